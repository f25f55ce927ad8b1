"""Kill, stop and cut ranks of a run of several processes, which the real launcher started; then the verdict."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ranks import run_ranks

from crosstune.distributed.environment import ATTEMPT
from injection.bench import Bench, Bits, differences, lost_or_torn, read_bits, untidy
from injection.kills import Trial
from injection.pacing import paced

NUM_STEPS = 16
SAVE_STEPS = 3
LIMIT_S = 1200.0
LATE_S = 60.0
"""Time on a busy machine between the limit of a hang and the end of the job."""
# Neither packed nor with dropout in the attention, which a process draws for its own rows.
ALIKE = {"packing": False, "batch_size": 1, "gradient_accumulation_steps": 1, "connect_timeout": "3m"}
OPTIONS: dict[str, Any] = {"max_steps": NUM_STEPS, "save_steps": SAVE_STEPS} | ALIKE
MOMENTS = ("while it starts", "at a step", "at a step", "while it saves")


@dataclass
class Launched:
    """A `crosstune train --world_size N` that runs."""

    folder: Path
    size: int
    process: subprocess.Popen[str]
    said: Path
    started: float = field(default_factory=time.monotonic)

    def ranks(self, attempt: int) -> dict[int, psutil.Process]:
        """The ranks of an attempt that are there."""
        found: dict[int, psutil.Process] = {}
        for child in _children(self.process.pid):
            variables = _environment(child)
            if variables.get(ATTEMPT) == str(attempt) and "RANK" in variables:
                found[int(variables["RANK"])] = child
        return found

    def await_ranks(self, attempt: int) -> dict[int, psutil.Process]:
        self.wait_until(lambda: len(self.ranks(attempt)) == self.size)
        return self.ranks(attempt)

    def steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait; return whether it came, rather than the end of the run."""
        until = time.monotonic() + LIMIT_S
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < until, f"waited too long: {self.said.read_text()[-3000:]}"
            time.sleep(0.02)
        return True

    def wait(self) -> int:
        try:
            return self.process.wait(timeout=LIMIT_S)
        finally:
            self.process.kill()


def launch(
    bench: Bench, folder: Path, *, size: int, method: str = "lora", pause_s: float = 0.0, **more: Any
) -> Launched:
    """Start a run; `pause_s` is the time after each step in which a test may interrupt it."""
    words = bench.words(method, folder, **OPTIONS | {"world_size": size} | more)
    said = folder.parent / f"{folder.name}.said"
    said.parent.mkdir(parents=True, exist_ok=True)
    with said.open("w") as file:
        command = [sys.executable, "-m", "crosstune", *words]
        environment = {**os.environ, **(paced(pause_s) if pause_s else {})}
        process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, text=True)
    return Launched(folder=folder, size=size, process=process, said=said)


def straight(bench: Bench, size: int, method: str) -> Bits:
    """The bits of the run of `size` processes that nothing interrupts."""
    folder = bench.home / f"straight-{method}-{size}"
    if not folder.exists():
        options = bench.options(method, folder, **OPTIONS | {"world_size": size})
        run_ranks([{"world": size, "runs": [options]}])
    return read_bits(folder)


def kill_ranks(bench: Bench, seed: int, *, size: int, num_kills: int, method: str = "lora") -> Trial:
    """Kill ranks of one run at random moments; it has to recover by itself, bit for bit."""
    rng = random.Random(seed)
    wanted = straight(bench, size, method)
    folder = bench.home / f"ranks-{method}-{size}-{seed}"
    run = launch(bench, folder, size=size, method=method, max_restarts=num_kills, pause_s=0.2)
    kills = 0
    for attempt in range(num_kills):
        if not run.wait_until(lambda attempt=attempt: len(run.ranks(attempt)) == size):  # type: ignore[misc]
            break
        _await_moment(run, rng)
        victims = list(run.ranks(attempt).values())
        if run.process.poll() is not None or not victims:
            break
        # Mostly one rank; sometimes all of them.
        for victim in victims if rng.random() < 0.15 else [rng.choice(victims)]:
            _kill(victim)
        kills += 1
        if not run.wait_until(lambda attempt=attempt: not run.ranks(attempt)):  # type: ignore[misc]
            break
    code = run.wait()
    problems = [] if code == 0 else [f"it ended with {code}: {run.said.read_text()[-3000:]}"]
    if not problems:
        problems = [*differences(read_bits(folder), wanted), *lost_or_torn(folder), *untidy(folder)]
    problems += [f"rank {rank} was left behind" for rank in run.ranks(num_kills)]
    if not problems:
        shutil.rmtree(folder)
        for aside in folder.parent.glob(f"{folder.name}~*"):
            shutil.rmtree(aside)
    return Trial(kind=f"kill ranks of {size}", method=method, seed=seed, problems=problems, kills=kills)


def stop_rank(bench: Bench, *, size: int, rank: int, limit_s: float, late_s: float = LATE_S) -> Trial:
    """Stop a rank with SIGSTOP; the job has to end at most `late_s` after the limit, and name the rank."""
    folder = bench.home / f"stopped-{size}-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    run = launch(bench, folder, size=size, max_steps=100_000, collective_timeout=f"{limit_s:g}s")
    ranks = run.await_ranks(0)
    run.wait_until(lambda: run.steps() >= 2)
    stopped = time.monotonic()
    os.kill(ranks[rank].pid, signal.SIGSTOP)
    code = run.wait()
    took_s = time.monotonic() - stopped
    said = run.said.read_text()
    problems = []
    if code != 1 or f"rank {rank} (host" not in said or "It was in: " not in said:
        problems.append(f"it ended with {code}: {said[-3000:]}")
    if took_s > limit_s + late_s:
        problems.append(f"it ended after {took_s:.1f} s, with a limit of {limit_s:g} s")
    problems += [f"rank {one} was left behind" for one, process in ranks.items() if _is_running(process)]
    return Trial(kind=f"stopped rank {rank} of {size}", method="lora", seed=rank, problems=problems)


def _await_moment(run: Launched, rng: random.Random) -> None:
    moment = rng.choice(MOMENTS)
    if moment == "while it starts":
        until = time.monotonic() + rng.uniform(0.0, 10.0)
        run.wait_until(lambda: time.monotonic() > until)
    elif moment == "at a step":
        target = rng.randint(run.steps() + 1, max(run.steps() + 1, NUM_STEPS - 1))
        run.wait_until(lambda: run.steps() >= target)
    else:
        run.wait_until(lambda: any((run.folder / "checkpoints").glob(".*")))


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _environment(process: psutil.Process) -> Mapping[str, str]:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return {}
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return {}
