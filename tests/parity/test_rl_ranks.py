"""Runs of the rl recipe in two processes over gloo equal a run in one process: each generates and scores its own prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rewards import use_rewards, vowels
from support import assert_close_after_adam, result_arrays

from crosstune.config.load import make_config
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.runs.pipeline import train

RUNS: dict[str, dict[str, Any]] = {
    "ddp": {"sharding_strategy": "ddp", "num_iterations": 2, "beta": 0.1, "dynamic_sampling": 1},
    "full_shard": {"sharding_strategy": "full_shard", "rl_loss": "grpo"},
}
HOOK = """
import pytest
from rewards import use_rewards, vowels
use_rewards(pytest.MonkeyPatch(), {"vowels": vowels})
"""
CLOSE = 1e-4


def options(folder: Path, name: str, world: int, **more: Any) -> dict[str, Any]:
    """Return the options of a run with 3 micro-batches per step, which two processes do not divide evenly."""
    return {
        "recipe": "rl", "reward": "json", "backend": "cpu", "model_name": "tiny-random", "precision": "fp32", "output_dir": str(folder),
        "dataset": str(folder / "prompts.jsonl"), "name": f"{name}-{world}", "world_size": world, "batch_size": 2,
        "rows_per_step": 5, "gradient_accumulation_steps": 1, "num_generations": 3, "max_new_tokens": 6, "lr": 1e-3, "wd": 0.0,
        "max_steps": 3, "eval_samples": 5, "lora_rank": 4, "save_minutes": 0, **more,
    }  # fmt: skip


def test_two_processes_equal_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"prompt": f"Say {number % 9} words."} for number in range(24)
    ]  # some prompts of a step are equal
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    use_rewards(monkeypatch, {"vowels": vowels})
    for name, more in RUNS.items():
        train(make_config(**options(tmp_path, name, 1, **more)))
    runs = [options(tmp_path, name, 2, **more) for name, more in RUNS.items()]
    run_ranks([{"world": 2, "runs": runs}], hook=HOOK)
    for name in RUNS:
        folders = [tmp_path / f"{name}-{world}" for world in (1, 2)]
        alone, together = (read_jsonl(folder / "metrics.jsonl") for folder in folders)
        assert len(alone) == len(together) == 3
        for row, wanted in zip(together, alone, strict=True):
            for key in (
                "loss",
                "grad_norm",
                "reward",
                "entropy",
                "completions/mean_length",
                "answer_tokens",
                "answers",
            ):
                if key not in wanted:
                    continue
                assert row.get(key) == pytest.approx(wanted.get(key), rel=CLOSE, abs=CLOSE), (name, key)
            assert row["sampling/sampling_logp_difference/max"] < 1e-5
        after = [read_json(folder / "summary.json")["eval_after"] for folder in folders]
        assert after[1] == pytest.approx(after[0], rel=CLOSE, abs=CLOSE)
        assert_close_after_adam(result_arrays(folders[1]), result_arrays(folders[0]), lr=1e-3, num_steps=3)
