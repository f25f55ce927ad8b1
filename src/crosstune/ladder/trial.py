"""Run trials in child processes, and read their measurements."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from crosstune.core.errors import EXIT_STOPPED, UserError
from crosstune.core.events import NonFinite
from crosstune.distributed.attempts import signal_name
from crosstune.files.atomic_files import remove_folder, write_text
from crosstune.files.run_lock import is_held
from crosstune.files.yaml_files import read_yaml
from crosstune.report.files import RunFiles, load_run, number

SLOWEST_LEFT_OUT = 0.1
"""Fraction of the measured steps that is dropped: the slowest, while another process had the machine."""
FEWEST_TO_DROP_FROM = 5
"""Measured steps below which none is dropped."""
TAIL_LINES = 8
_NOT_IN_JSON = ("warmup", "rows", "on_one_cpu")
Status = Literal["finished", "out_of_memory", "failed", "too_slow"]
# Run `crosstune` in a process that exits with the ladder; the first argument is the ladder's process id.
FOLLOWING = """
import runpy, sys
from crosstune.distributed.launch import follow
follow(int(sys.argv.pop(1)))
runpy.run_module("crosstune", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One short run and its measurements."""

    name: str
    status: Status
    error: str = ""
    """Why it did not finish."""
    seconds: float = 0.0
    warmup: int = 0
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of metrics.jsonl."""
    peak_bytes: int = 0
    num_nonfinite: int = 0
    on_one_cpu: bool = False
    """True if one process computed everything on the CPU."""

    @property
    def finished(self) -> bool:
        return self.status == "finished"

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second in the steps after the warm-up, without the slowest."""
        return self._rate("step_s")

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per second of CPU time, hardly affected by other load; 0 with several processes or a GPU."""
        return self._rate("cpu_s") if self.on_one_cpu else 0.0

    def _rate(self, spent: str) -> float:
        measured = sorted(self.rows[self.warmup :], key=lambda row: number(row.get(spent)) or 0.0)
        dropped = math.ceil(len(measured) * SLOWEST_LEFT_OUT) if len(measured) >= FEWEST_TO_DROP_FROM else 0
        kept = measured[: len(measured) - dropped]
        seconds = sum(number(row.get(spent)) or 0.0 for row in kept)
        return sum(number(row.get("tokens")) or 0.0 for row in kept) / seconds if seconds else 0.0

    def values(self, metric: str) -> list[float]:
        """Return a metric of every step, NaN where it is missing."""
        found = (number(row.get(metric)) for row in self.rows)
        return [math.nan if value is None else value for value in found]

    def to_json(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name not in _NOT_IN_JSON}
        rates = {"tokens_per_s": self.tokens_per_s, "tokens_per_cpu_s": self.tokens_per_cpu_s}
        return fields | rates | {"losses": self.values("loss")}


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Run trials below one folder; a trial that finished before is read instead."""

    folder: Path
    steps: int
    warmup: int
    limit_s: float
    """Seconds after which a trial is stopped."""
    should_stop: Callable[[], bool] = lambda: False

    def run(self, name: str, options: Mapping[str, Any], **more: Any) -> Trial:
        """Train `steps` steps with the options; `more` are options of this trial only."""
        folder = self.folder / name
        asked = {**options, **self._fixed(name), **more}
        self._wait_for_leftover(folder)
        if (done := self.read_finished(folder, asked)) is not None:
            return done
        if folder.exists():
            remove_folder(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name}.yaml"
        write_text(file, yaml.safe_dump(asked, sort_keys=False, allow_unicode=True))
        begun, log = time.monotonic(), self.folder / f"{name}.log"
        words = [str(os.getpid()), "train", "--config", str(file)]
        code = self._wait([sys.executable, "-c", FOLLOWING, *words], log)
        return self._read(name, code=code, seconds=time.monotonic() - begun, log=log)

    def _wait_for_leftover(self, folder: Path) -> None:
        """Wait for a trial of a killed ladder that still writes into its folder."""
        ends_at = time.monotonic() + self.limit_s
        while is_held(folder) and time.monotonic() < ends_at:
            if self.should_stop():
                raise KeyboardInterrupt
            time.sleep(0.1)

    def _fixed(self, name: str) -> dict[str, Any]:
        """Return the options that are the same in every trial."""
        return {
            "name": name,
            "output_dir": str(self.folder),
            "max_steps": self.steps,
            "num_epochs": 0,
            "skip_eval": True,
            "save_model": False,
            "save_steps": 0,
            "save_minutes": 0,
            "resume": "none",
            "log_to": "stdout",
        }

    def _wait(self, command: list[str], log: Path) -> int | None:
        """Return the exit code of a command; None if it exceeded `limit_s`. Raise KeyboardInterrupt on a stop."""
        log.unlink(missing_ok=True)
        with log.open("wb") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ends_at = time.monotonic() + self.limit_s
                while child.poll() is None:
                    if self.should_stop():
                        raise KeyboardInterrupt
                    if time.monotonic() > ends_at:
                        return None
                    time.sleep(0.1)
                return child.returncode
            finally:
                if child.poll() is None:
                    child.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(20)
                    child.kill()
                    child.wait()

    def read_finished(self, folder: Path, asked: Mapping[str, Any]) -> Trial | None:
        """Return a trial that finished earlier with the same options and intact files."""
        file = folder.parent / f"{folder.name}.yaml"
        try:
            before = read_yaml(file)
            run = load_run(folder)
        except (OSError, UserError):
            return None
        damaged = run.problems or not run.plan  # the rungs need the plan
        if before != dict(asked) or damaged or run.summary.get("status") != "finished":
            return None
        seconds = number(run.summary.get("seconds")) or 0.0
        found = self._read(folder.name, code=0, seconds=seconds, log=folder)
        return found if found.finished else None

    def _read(self, name: str, *, code: int | None, seconds: float, log: Path) -> Trial:
        folder, run = self.folder / name, RunFiles(folder=self.folder / name)
        with contextlib.suppress(UserError):  # it failed before it had a folder
            run = load_run(folder)
        if code == EXIT_STOPPED and self.should_stop():
            raise KeyboardInterrupt
        status, error = self._judge(code, log, run)
        return Trial(
            name=name,
            status=status,
            error=error,
            seconds=seconds,
            warmup=self.warmup,
            rows=run.metrics,
            peak_bytes=int(number(run.summary.get("peak_memory_bytes")) or 0),
            num_nonfinite=len(run.events_of(NonFinite)),
            on_one_cpu=run.plan.get("backend") == "cpu" and run.plan.get("world_size") == 1,
        )

    def _judge(self, code: int | None, log: Path, run: RunFiles) -> tuple[Status, str]:
        """Return the status of a trial, and why it did not finish."""
        if code is None:
            return "too_slow", f"it ran longer than {self.limit_s:g} s and was stopped"
        if code == 0:
            if len(run.metrics) >= self.steps:
                return "finished", ""
            return "failed", f"it ended after {len(run.metrics)} of {self.steps} steps"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
        said = [line.strip() for line in lines if line.strip()][-TAIL_LINES:]
        ended = " ".join(str(event.get("error", "")) for event in run.events if event.get("kind") == "failed")
        status: Status = "out_of_memory" if "memory" in ended.lower() else "failed"
        how = f"exit code {code}"
        if code < 0:
            how = f"killed by {signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += ", as the system does when memory runs out"
        return status, f"{how}: {' / '.join(said)}" if said else f"{how}, without output"


def middle(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan
