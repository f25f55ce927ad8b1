"""Requests that a judge refuses before it trains: what was asked is named, and no folder is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judge_data")
    for split, count in (("train", 12), ("val", 4), ("test", 6)):
        rows = [
            {
                "id": f"{split}{n}",
                "task": f"write {split} {n}",
                "answer": "a good text",
                "score": 1.0 + 8 * (n % 2),
            }
            for n in range(count)
        ]
        (folder / f"judge_{split}.json").write_text(json.dumps(rows))
    return folder


def options(model: Path, data: Path, backend: str, **more: Any) -> dict[str, Any]:
    shared = {"model_name": str(model), "dataset": str(data), "backend": backend, "precision": "fp32"}
    return shared | {"train_type": "lora", "batch_size": 4, "max_steps": 4, "num_samples": 0} | more


def words_of(flags: dict[str, Any]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"packing": True}, "--packing"),
        ({"train_on_prompt": True}, "--train_on_prompt"),
        ({"truncation": "cut"}, "--truncation cut"),
        ({"head": "scalar", "train_type": "dora"}, "--head scalar"),
        ({"verdict": "winner"}, "does not match the data"),
        ({"score_scale": "0-5"}, "outside the scale 0-5"),
        ({"backend": "mlx", "head": "scalar"}, "torch only"),
    ],
)
def test_requests_that_a_judge_refuses(
    tiny_model: Path,
    data: Path,
    tmp_path: Path,
    asked: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = options(tiny_model, data, "cpu", output_dir=str(tmp_path), name="x") | asked
    assert main(["judge", "train", *words_of(flags)]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
