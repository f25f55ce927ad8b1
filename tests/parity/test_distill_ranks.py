"""Distillation in three processes over gloo equals a run in one process, on the data and on own answers; and it moves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from support import assert_close_after_adam, chat, result_arrays

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.tiny import tiny_model
from crosstune.runs.move import move
from crosstune.runs.pipeline import train

CLOSE = 1e-5
RUNS: dict[str, dict[str, Any]] = {
    "live": {"train_type": "full", "distill_loss": "jsd"},
    "stored": {"teacher_top_k": 8, "sharding_strategy": "ddp"},
    "own answers": {"on_policy_share": 0.5, "max_new_tokens": 6, "sharding_strategy": "ddp"},
    "base": {"ce_weight": 1.0, "sharding_strategy": "ddp"},
}


def options(folder: Path, *, world: int, name: str, **more: Any) -> dict[str, Any]:
    """Return the options of a run with 7 micro-batches per step, which 3 processes do not divide evenly."""
    teacher = "student" if name.startswith("base") else "teacher"
    return (
        {"recipe": "distill", "backend": "cpu", "model_name": str(folder / "student"), "precision": "fp32"}
        | {"teacher": str(folder / teacher), "dataset": str(folder / "data.jsonl"), "output_dir": str(folder)}
        | {"batch_size": 2, "rows_per_step": 14, "gradient_accumulation_steps": 1, "world_size": world}
        | {"lr": 1e-3, "max_steps": 2, "eval_samples": 7, "num_samples": 0, "save_minutes": 0, "name": name}
        | {"num_epochs": 9}
        | more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    tiny_model(folder / "student")
    tiny_model(folder / "teacher", hidden=96, num_layers=3)
    # Some prompts twice: their answers differ, and in the same way at every world size.
    rows = [chat(f"{n % 16} + {n % 3}?", f"{n % 16 + n % 3}" + ", surely" * (n % 4)) for n in range(48)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def assert_same_run(found: Path, expected: Path) -> None:
    rows, wanted = (read_jsonl(run / "metrics.jsonl") for run in (found, expected))
    assert len(rows) == len(wanted) == 2
    for metric in ("loss", "grad_norm", "kl", "cross_entropy", "agreement", "supervised_tokens"):
        assert [row[metric] for row in rows] == pytest.approx(
            [row[metric] for row in wanted], rel=CLOSE, abs=CLOSE
        ), f"{found.name} {metric}"
    after = [read_json(run / "summary.json")["eval_after"] for run in (found, expected)]
    assert after[0] == pytest.approx(after[1], rel=CLOSE, abs=CLOSE), found.name
    assert_close_after_adam(result_arrays(found), result_arrays(expected), lr=1e-3, num_steps=2)


@pytest.mark.slow
def test_several_processes_give_the_runs_of_one(folder: Path) -> None:
    for name, more in RUNS.items():
        train(make_config(**options(folder, world=1, name=f"{name}-1", **more)))
    runs = [options(folder, world=3, name=f"{name}-3", **more) for name, more in RUNS.items()]
    run_ranks([{"world": 3, "runs": runs}])
    for name in RUNS:
        assert_same_run(folder / f"{name}-3", folder / f"{name}-1")


@pytest.mark.slow
def test_a_run_moves_to_mlx_and_back(folder: Path, tmp_path: Path) -> None:
    """With a live teacher; stored distributions: tests/engine/test_distill_runs.py."""
    more = {"distill_loss": "jsd", "packing": True, "context_length": 96}
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    asked = options(
        folder, world=1, name="run", save_steps=2, skip_eval=True, lr_scheduler="constant", output_dir=str(tmp_path), **more
    )  # fmt: skip
    straight = train(make_config(**asked | {"max_steps": 6, "name": "straight"})).folder
    home = train(make_config(**asked)).folder
    for steps, backend in ((4, "mlx"), (6, "cpu")):
        report = move(home, to=backend, observer=Observers())
        assert report["compared"]["difference"] < 1e-4  # of small divergences
        home = tmp_path / backend / "run"
        words = ["train", "--resume", report["path"], "--backend", backend, "--output_dir", str(home.parent)]
        assert main([*words, "--max_steps", str(steps)]) == 0
        assert "computed again" not in (home / "events.jsonl").read_text()
    losses = [[row["loss"] for row in read_jsonl(run / "metrics.jsonl")] for run in (home, straight)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
