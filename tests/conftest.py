"""What several tiers share: a tiny model, the marker for GPUs, small ways to run things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.machine import Machine
from crosstune.machines.probe import load_machine


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked or _has_cuda():
        return
    for item in marked:
        item.add_marker(
            pytest.mark.skip(reason="no NVIDIA GPU here; run `pytest -m cuda` on a machine with one")
        )


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of a few hundred thousand parameters, with a tokenizer and a chat template."""
    from crosstune.models.tiny import tiny_model as make

    return make(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def cpu_laptop() -> Machine:
    return load_machine("cpu-laptop")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Any:
    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
