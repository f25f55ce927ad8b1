"""A small training for real clusters on this machine, and how to follow and compare it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from ranks import run_ranks

PATIENCE_S = 900.0
"""Against a hang; a busy machine takes a minute to start the processes."""
NUM_STEPS = 40
PAUSE_S = 0.3
"""The pause after each step of a run that a test interrupts: ten seconds of a busy machine pass before it has ended."""


def training(model: Path, data: Path, **more: Any) -> dict[str, Any]:
    """Return the options of a small training."""
    return {
        "backend": "cpu",
        "model_name": model,
        "dataset": data,
        "precision": "fp32",
        "train_type": "lora",
        "max_steps": NUM_STEPS,
        "save_steps": 5,
        "keep_last_n": 20,
        "skip_eval": True,
        "batch_size": 4,
        "context_length": 64,
        "lr": 1e-3,
    } | more


def flags(options: Mapping[str, Any]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def straight(options: Mapping[str, Any], folder: Path) -> list[tuple[int, float, float]]:
    """Train with two processes of this machine that nothing interrupts; return its numbers."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    asked |= {"world_size": 2, "output_dir": str(folder), "name": "straight"}
    run_ranks([{"world": 2, "host": 1, "runs": [asked]}])
    return numbers(folder / "straight")


def write_sums(path: Path) -> Path:
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{a} + {b}?"},
                {"role": "assistant", "content": str(a + b)},
            ]
        }
        for a in range(30)
        for b in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def launch(words: list[str], *, folder: Path, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """Start `crosstune launch` in a folder."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "crosstune", "launch", *words],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def metrics(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def numbers(run: Path) -> list[tuple[int, float, float]]:
    """What must be the same, bit for bit, in a run that was interrupted."""
    return [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(run)]


def wait_until(true: Callable[[], object], *, what: str, log: Path | None = None) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        said = f"\n{log.read_text()}" if log and log.exists() else ""
        assert time.monotonic() < until, f"{what} did not happen{said}"
        time.sleep(0.1)


@contextmanager
def killed_at_the_end(processes: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in reversed(processes):
            kill_tree(process.pid)
            process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants at once, as when their machine loses power."""
    try:
        parent = psutil.Process(pid)
        tree = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
