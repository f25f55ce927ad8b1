"""Shared by the judge benchmarks: train a judge through the recipe and judge the test items with it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import crosstune
from crosstune.core.events import Event, Observers, StepMetrics, TrainingStarted
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge, Judgement
from crosstune.recipes.judge.open_splits import JudgeData, open_judge_data
from crosstune.runs.judges import JudgeRequest, open_judge, run_config

PLAIN: dict[str, Any] = {
    "recipe": "judge",
    "optimizer": "adamw",
    "grad_norm": 1.0,
    "use_gradient_checkpointing": False,
    "lora_target_modules": "all",
    "lora_dropout": 0.0,
    "gradient_accumulation_steps": 1,
    "context_length": 1024,
    "truncation": "drop",
    "eval_steps": 0,
    "save_steps": 0,
    "save_minutes": 0,
    "num_samples": 0,
    "result": "last",
    "overwrite": True,
}
"""Every option that a preset of the recipe would choose, so that all backends do the same."""
SECONDS_BETWEEN_LINES = 10
LEARNING_RATES = {"full": 5e-5, "lora": 5e-4}


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--precision", default="auto", help="auto: bf16_autocast on a GPU, fp32 on a CPU")
    parser.add_argument("--method", choices=("full", "lora"), default="full")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--lr", type=float, help="default 5e-5 for full, 5e-4 for lora")
    parser.add_argument("--eval_batch_size", type=int, default=64)
    parser.add_argument("--runs", type=Path, default=Path("judge-runs"), help="folder for the runs")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser


def training_options(own: argparse.Namespace) -> dict[str, Any]:
    gpu = own.backend in ("cuda", "rocm") or (own.backend == "auto" and _has_cuda())
    precision = own.precision if own.precision != "auto" else "bf16_autocast" if gpu else "fp32"
    return PLAIN | {
        "model_name": own.model,
        "backend": own.backend,
        "train_type": own.method,
        "precision": precision,
        "batch_size": own.batch_size,
        "num_epochs": own.epochs,
        "lr": own.lr or LEARNING_RATES[own.method],
        "output_dir": str(own.runs),
    }


class Lines:
    """Print the progress of a run as lines, at most one every ten seconds."""

    def __init__(self, name: str) -> None:
        self.name, self.num_steps = name, 0
        self.started = self.printed = time.perf_counter()

    def on_event(self, event: Event) -> None:
        if isinstance(event, TrainingStarted):
            self.num_steps, self.started = event.num_steps, time.perf_counter()

    def on_step(self, metrics: StepMetrics) -> None:
        now, step = time.perf_counter(), metrics["step"]
        if now - self.printed > SECONDS_BETWEEN_LINES or step == self.num_steps:
            self.printed = now
            rate = step / (now - self.started)
            left = (self.num_steps - step) / rate
            print(
                f"{self.name}: step {step}/{self.num_steps}, loss {metrics['loss'] or 0:.3f}, {rate:.2f} steps/s, "
                f"{left:.0f} s left",
                flush=True,
            )


def train_judge(options: dict[str, Any]) -> tuple[Path, float]:
    """Train; return the run and the seconds of its steps and evaluations."""
    run = crosstune.train(progress=False, callbacks=[Lines(str(options["name"]))], **options)
    if run.summary["status"] != "finished":  # stopped by a signal: the model was not trained as requested
        sys.exit(f"{options['name']} is {run.summary['status']} after {run.summary['steps']} steps")
    return run.folder, float(run.summary["seconds"])


def open_trained(
    run: Path, own: argparse.Namespace, *, items: Sequence[Item], untrained: bool = False
) -> Judge:
    """Open a run, or its base model, in fp32 as `crosstune judge eval` does."""
    config = run_config(run)
    assert config is not None
    request = JudgeRequest(
        target=str(run), backend=own.backend, batch_size=own.eval_batch_size, untrained=untrained
    )
    return open_judge(request, items=items, config=config, observer=Observers())


def judge_data(run: Path, **options: Any) -> JudgeData:
    """Return the items of a run by split; `options` override the options of the run."""
    config = run_config(run)
    assert config is not None
    return open_judge_data(dataclasses.replace(config, **options))


def timed(
    judge: Judge, items: Sequence[Item], *, what: str = "judged", **options: Any
) -> tuple[list[Judgement], float]:
    """Return the verdicts and the seconds per item; print the progress as lines."""
    started = printed = time.perf_counter()

    def show(done: int, total: int) -> None:
        nonlocal printed
        now = time.perf_counter()
        if now - printed > SECONDS_BETWEEN_LINES:
            printed, rate = now, done / (now - started)
            print(
                f"{what}: {done}/{total} prompts, {rate:.2f}/s, {(total - done) / rate:.0f} s left",
                flush=True,
            )

    found = judge.judge(items, progress=show, **options)
    return found, (time.perf_counter() - started) / len(items)


def write_results(path: Path | None, results: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        print(f"written  {path}", flush=True)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
