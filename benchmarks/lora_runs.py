"""Run the contenders of a comparison in separate processes, and keep their results; for the benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Results:
    """Results by part, in a file that is complete after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.data["versions"] = versions()
        self.data["date"] = time.strftime("%Y-%m-%d")
        self.data.setdefault("commands", []).append(" ".join(sys.argv))

    def add(self, part: str, row: dict[str, Any]) -> None:
        self.data.setdefault(part, []).append(row)
        self.path.write_text(json.dumps(self.data, indent=1))

    def limit(self) -> dict[str, float]:
        found: dict[str, float] = self.data["limit"][-1] if self.data.get("limit") else {}
        return found


def alternating_order(names: list[str], rounds: int) -> list[str]:
    """Return the order A B C C B A ..., in which slow changes of the machine affect all equally."""
    return [name for turn in range(rounds) for name in (names if turn % 2 == 0 else names[::-1])]


def start_worker(script: Path, job: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Run `script --worker JOB` and return the result that it prints, or its error."""
    command = [sys.executable, str(script), "--worker", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": (done.stderr or done.stdout).strip()[-1500:]}
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


class Worker:
    """A process of `script --worker JOB` that imports its packages and then waits for `finish`. Its output is in a log."""

    def __init__(self, script: Path, job: dict[str, Any], *, log: Path, packages: str = "") -> None:
        self.log = log
        paths = [path for path in (packages, os.environ.get("PYTHONPATH", "")) if path]
        with log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(script), "--worker", json.dumps(job)],
                stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )  # fmt: skip

    def finish(self, *, timeout: float) -> dict[str, Any]:
        """Let it run, and return the result that it prints, or its error."""
        try:
            self.process.communicate("\n", timeout=timeout)
        except subprocess.TimeoutExpired:
            self.stop()
            return {"error": f"no result after {timeout:.0f} s"}
        said = self.log.read_text(errors="replace")
        lines = [line for line in said.splitlines() if line.startswith("RESULT ")]
        if self.process.returncode or not lines:
            return {"error": said.strip()[-1500:] or f"exit code {self.process.returncode}"}
        found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def print_result(found: dict[str, Any]) -> None:
    print("RESULT " + json.dumps(found))


def describe(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['contender']}: {row['error'].splitlines()[-1] if row['error'] else 'failed'}"
    text = (
        f"{row['contender']}: {row['tok_s']:,.0f} tok/s, {row['round_ms']:.1f} ms "
        f"({row['spread'][0]:.1f} to {row['spread'][1]:.1f}), first step {row['first_step_s']:.1f} s, "
        f"loaded in {row['load_s']:.1f} s, loss {row['first_loss']:.4f} -> {row['last_loss']:.4f}"
    )
    if row["launches"]:
        text += "\n    {kernels} kernels, {busy_ms:.1f} of {wall_ms:.1f} ms busy".format(**row["launches"])
        for gap, before, after in row["launches"]["longest_idle"]:
            text += f"\n    idle for {gap:.0f} us between {before} and {after}"
    for busiest in (row["launches"] or {}).get("busiest", ()):
        text += f"\n    {busiest[0]:8.2f} ms {busiest[1]:6d}  {busiest[2]}"
    return text


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger_kernel", "unsloth"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
