"""Preference runs in one, two and three processes over gloo, and on both engines in turn, equal a run in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from support import assert_close_after_adam, result_arrays

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.events import Observers
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.models.tiny import tiny_model
from crosstune.runs.move import move
from crosstune.runs.pipeline import train

CLOSE = 1e-5
FULL = {"train_type": "full"}
RUNS: dict[str, dict[str, Any]] = {
    "mixture": {"preference_loss": "dpo:0.8,apo_zero:0.2,bco:0.5,sft:1", "modules_to_save": "embed_tokens,lm_head"},
    "kto": {"preference_loss": "kto", "reference": "precomputed"},
    "full": FULL | {"reference": "online", "sharding_strategy": "shard_grad_op"},
    "stored": FULL | {"use_cpu_offload": True, "no_sync": True, "save_steps": 1, "keep_last_n": 9},
    "ddp": {"sharding_strategy": "ddp", "lora_dropout": 0.0},
}  # fmt: skip


def options(folder: Path, *, world: int, name: str, **more: Any) -> dict[str, Any]:
    """Return the options of a run with 7 micro-batches per step, which neither 2 nor 3 processes divide evenly."""
    return (
        {"recipe": "preference", "backend": "cpu", "model_name": str(folder / "model"), "precision": "fp32"}
        | {"dataset": str(folder / "pairs.jsonl"), "output_dir": str(folder), "name": name}
        | {"batch_size": 2, "rows_per_step": 14, "gradient_accumulation_steps": 1, "world_size": world}
        | {"lr": 1e-3, "max_steps": 2, "eval_samples": 7, "num_samples": 0, "save_minutes": 0}
        | more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    tiny_model(
        folder / "model", hidden=36, intermediate=70, num_heads=3, num_kv_heads=1, num_layers=3, vocab=507
    )
    rows = [
        {
            "prompt": f"{a} + {b}?",
            "chosen": "is " * (a % 5) + str(a + b),
            "rejected": "no " * (b % 4) + "idea",
        }
        for a in range(12)
        for b in range(8)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def assert_same_run(found: Path, expected: Path, *, steps: int) -> None:
    rows, wanted = (read_jsonl(run / "metrics.jsonl") for run in (found, expected))
    measured = [name for name, value in wanted[0].items() if isinstance(value, float) and "/" in name]
    assert len(rows) == len(wanted) == steps and len(measured) >= 5
    for name in ("loss", "grad_norm", *measured):
        np.testing.assert_allclose(
            [row[name] for row in rows], [row[name] for row in wanted], rtol=CLOSE, atol=CLOSE, err_msg=f"{found.name} {name}"
        )  # fmt: skip
    after = [read_json(run / "summary.json")["eval_after"] for run in (found, expected)]
    assert after[0] == pytest.approx(after[1], rel=CLOSE, abs=CLOSE), found.name
    assert_close_after_adam(result_arrays(found), result_arrays(expected), lr=1e-3, num_steps=steps)


@pytest.mark.slow
def test_every_loss_and_reference_in_three_processes_and_in_two(folder: Path) -> None:
    for name, more in RUNS.items():
        train(make_config(**options(folder, world=1, name=f"{name}-1", **more)))
    runs = [options(folder, world=3, name=f"{name}-3", **more) for name, more in RUNS.items()]
    run_ranks([{"world": 3, "runs": runs}])
    for name in RUNS:
        assert_same_run(folder / f"{name}-3", folder / f"{name}-1", steps=2)
    # A run of one process continues in two, with the stored numbers.
    asked = options(folder, world=2, name="on", **RUNS["stored"])
    del asked["rows_per_step"], asked["gradient_accumulation_steps"]
    run_ranks(
        [
            {
                "world": 2,
                "runs": [asked | {"resume": str(folder / "stored-1" / "checkpoints" / "step-00000001")}],
            }
        ]
    )
    assert_same_run(folder / "on", folder / "stored-1", steps=2)
    stored = [(folder / run / "reference.safetensors").read_bytes() for run in ("stored-1", "on")]
    assert stored[0] == stored[1]


@pytest.mark.slow
def test_the_stored_reference_moves_to_mlx_and_back(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")
    asked = options(
        folder,
        world=1,
        name="run",
        reference="precomputed",
        save_steps=2,
        skip_eval=True,
        lr_scheduler="constant",
    )
    straight = train(make_config(**asked | {"max_steps": 6, "name": "straight"})).folder
    home = train(make_config(**asked)).folder
    whole = (home / "reference.safetensors").read_bytes()
    for steps, backend in ((4, "mlx"), (6, "cpu")):
        report = move(home, to=backend, observer=Observers())
        assert report["compared"]["difference"] < 1e-5
        home = tmp_path / backend / "run"
        words = ["train", "--resume", report["path"], "--backend", backend, "--output_dir", str(home.parent)]
        assert main([*words, "--max_steps", str(steps)]) == 0
        assert (home / "reference.safetensors").read_bytes() == whole
        assert "computed again" not in (home / "events.jsonl").read_text()
    losses = [[row["loss"] for row in read_jsonl(run / "metrics.jsonl")] for run in (home, straight)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
