"""Fixtures that several tiers share: a tiny model, the marker for GPUs, small ways to run things."""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import FRAMEWORKS

from crosstune.estimate.machine import Machine
from crosstune.machines.probe import load_machine


def pytest_configure() -> None:
    """Take Ctrl-C back where a shell that runs the tests in the background ignores it: children would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the imported modules and the tests out of every search for garbage: one took half a second."""
    gc.freeze()
    gc.enable()


LONGEST = (
    "test_adapter_options.py",
    "test_interrupted_outputs.py",
    "test_judge.py",
    "test_mlx_ranks.py",
    "test_option_effects.py",
    "test_rank_faults.py",
    "test_sharded_losses.py",
)
"""Begun first, so that no process is left with one of them at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    _skip(
        [item for item in items if item.get_closest_marker("cuda")],
        unless=_has_cuda,
        reason="no NVIDIA GPU here; run `pytest -m cuda` on a machine with one",
    )
    _skip(
        [item for item in items if _computes_in_16_bits(item)],
        unless=_has_16_bit_arithmetic,
        reason="16-bit products of torch run at less than a fifth of fp32 on this processor; use one with AMX, "
        "AVX512-BF16 or Arm's bf16",
    )


def _skip(items: list[pytest.Item], *, unless: Callable[[], bool], reason: str) -> None:
    if items and not unless():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def _computes_in_16_bits(item: pytest.Item) -> bool:
    """Marked so, or run for a precision of 16 bits on torch's CPU."""
    if item.get_closest_marker("sixteen_bit"):
        return True
    if item.path.parent.name not in ("engine", "parity") or item.get_closest_marker("cuda"):
        return False
    spec = getattr(item, "callspec", None)
    values = [str(value) for value in spec.params.values()] if spec is not None else []
    return any("bf16" in value or "fp16" in value for value in values) and "mlx" not in values


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_16_bit_arithmetic() -> bool:
    from crosstune.torch_engine.capabilities import bf16_speedup

    return bf16_speedup("cpu") > 0.2


@pytest.fixture(autouse=True)
def no_framework_in_unit_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that loads a framework."""
    before = FRAMEWORKS & sys.modules.keys()
    yield
    if request.path.parent.name == "unit":
        loaded = sorted((FRAMEWORKS & sys.modules.keys()) - before)
        assert not loaded, f"a unit test loaded {', '.join(loaded)}: move it to tests/engine or tests/parity"


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
