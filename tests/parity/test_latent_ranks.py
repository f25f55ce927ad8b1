"""Latent diffusion in two processes over gloo equals one process: replicated, and sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from support import assert_close_after_adam

from crosstune.config.load import make_config
from crosstune.files.json_files import read_jsonl
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.texts import WriteOptions
from crosstune.runs.pipeline import train

MODES = ("l2t", "t2l", "sequential")
RUNS = [("t2l", "ddp"), ("l2t", "full_shard"), ("sequential", "full_shard")]
ROWS = 8


def options(folder: Path, *, world: int, name: str, mode: str, strategy: str = "ddp") -> dict[str, Any]:
    """Eight rows a step, in so many batches of four that each process has its share."""
    return (
        {"recipe": "latent_diffusion", "dataset": str(folder / "pairs"), "output_dir": str(folder)}
        | {"backend": "cpu", "precision": "fp32", "hidden_size": 36, "n_heads": 2}
        # A single block is sharded with the root, which stays gathered after a pass.
        | {"n_blocks": 1 if mode == "l2t" else 2}
        | {"batch_size": 4, "gradient_accumulation_steps": ROWS // 4 // world, "world_size": world}
        | {"sharding_strategy": strategy, "loss_type": mode}
        | {"sequential_schedule": "l2t:1,t2l:1,unconditional:1", "ema_decay": 0.5, "lr": 3e-3}
        | {"max_steps": 3, "eval_samples": 8, "decode_steps": 2, "num_samples": 1, "save_minutes": 0}
        | {"name": name}
    )


@pytest.mark.slow
def test_two_processes_train_and_decode_as_one(tmp_path: Path) -> None:
    build(
        BuildRequest(
            source="grammar", out=tmp_path / "pairs", max_texts=120, options=WriteOptions(max_tokens=12)
        )
    )
    for mode in MODES:
        train(make_config(**options(tmp_path, world=1, name=f"{mode}-1", mode=mode)))
    run_ranks(
        [
            {
                "world": 2,
                "host": 2,
                "runs": [
                    options(tmp_path, world=2, name=f"{mode}-2-{strategy}", mode=mode, strategy=strategy)
                    for mode, strategy in RUNS
                ],
            }
        ]
    )
    for mode, strategy in RUNS:
        one = read_jsonl(tmp_path / f"{mode}-1" / "metrics.jsonl")
        run = tmp_path / f"{mode}-2-{strategy}"
        two = read_jsonl(run / "metrics.jsonl")
        for column in ("loss", "grad_norm"):
            np.testing.assert_allclose(
                [row[column] for row in two],
                [row[column] for row in one],
                rtol=1e-4,
                err_msg=f"{run.name} {column}",
            )
        _check_results(tmp_path / f"{mode}-1", run)


def _check_results(one: Path, two: Path) -> None:
    from safetensors.numpy import load_file

    expected, found = (load_file(run / "model" / "model.safetensors") for run in (one, two))
    assert_close_after_adam(found, expected, lr=3e-3, num_steps=3)
    assert sorted(path.name for path in (two / "model").iterdir()) == sorted(
        path.name for path in (one / "model").iterdir()
    )
