"""Check a machine: probe every backend, then train three steps on each available one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.core.quantization import quantizer_names
from crosstune.estimate.machine import Machine, auto_order, auto_reason
from crosstune.files.json_files import read_jsonl
from crosstune.machines.probe import preference, probe_machine, recommend

NUM_STEPS = 3
TOLERANCE = 1e-3
"""Largest relative difference from the fp32 loss on the CPU."""
TIME_LIMIT_S = 300


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one short run."""

    backend: str
    ran: bool
    agrees: bool = False
    losses: tuple[float, ...] = ()
    difference: float | None = None
    """The largest relative difference from the reference."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The probed machine, the short runs, and advice."""

    machine: Machine
    checks: tuple[Check, ...]
    advice: tuple[str, ...]

    @property
    def auto_order(self) -> list[str]:
        """The available backends in the order of `auto`."""
        return auto_order(self.machine, preference=preference())

    @property
    def auto_reason(self) -> dict[str, str]:
        """The backend of `auto` -> why; empty if none is available."""
        order = self.auto_order
        return {order[0]: auto_reason(self.machine, preference=preference())} if order else {}

    def to_json(self) -> dict[str, Any]:
        """Return a machine report for `crosstune plan --machine`, with the checks added."""
        return self.machine.to_json() | {
            "checks": [asdict(check) for check in self.checks],
            "advice": self.advice,
        }


def diagnose(*, train: bool = True, on_progress: Callable[[str], None] = lambda text: None) -> Diagnosis:
    on_progress("probing backends")
    machine = probe_machine(quantizers=quantizer_names())
    checks = tuple(_check_all(machine, on_progress)) if train else ()
    return Diagnosis(machine=machine, checks=checks, advice=tuple(recommend(machine)))


def _check_all(machine: Machine, on_progress: Callable[[str], None]) -> list[Check]:
    reference = _train_briefly("cpu", on_progress) if "cpu" in machine.available() else None
    checks = []
    for name in machine.available():
        check = reference if name == "cpu" and reference is not None else _train_briefly(name, on_progress)
        checks.append(_compare(check, reference))
    return checks


def _train_briefly(backend: str, on_progress: Callable[[str], None]) -> Check:
    """Train a tiny model for three steps in fp32, in a child process, since a driver may crash."""
    on_progress(f"training {NUM_STEPS} steps on {backend}")
    with tempfile.TemporaryDirectory(prefix="crosstune-doctor-") as folder:
        flags = {
            "backend": backend,
            "model_name": "tiny-random",
            "dataset": "commands",
            "dataset_samples": NUM_STEPS * 4,
            "batch_size": 4,
            "max_steps": NUM_STEPS,
            "precision": "fp32",
            "world_size": 1,
            "lr": 1e-3,
            "output_dir": folder,
            "name": "check",
            "skip_eval": "true",
            "save_model": "false",
        }
        command = [sys.executable, "-m", "crosstune", "train"]
        command += [f"--{name}={value}" for name, value in flags.items()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return Check(backend=backend, ran=False, error=f"not finished after {TIME_LIMIT_S} s")
        if done.returncode != 0:
            return Check(backend=backend, ran=False, error=_reason(done))
        losses = tuple(row["loss"] for row in read_jsonl(Path(folder) / "check" / "metrics.jsonl"))
    return Check(backend=backend, ran=True, losses=losses)


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith("crosstune: ")]
    found = [*named[:1], *lines[-1:], f"exited with code {done.returncode}"]
    return found[0].removeprefix("crosstune: ")


def _compare(check: Check, reference: Check | None) -> Check:
    if not check.ran or reference is None or not reference.ran:
        return check
    pairs = list(zip(check.losses, reference.losses, strict=True))
    difference = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    return replace(check, difference=difference, agrees=difference <= TOLERANCE)
