"""Run the trials of a ladder, and read their measurements."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from crosstune.core.errors import EXIT_STOPPED, UserError
from crosstune.core.events import NonFinite
from crosstune.files.atomic_files import remove_folder
from crosstune.files.yaml_files import read_yaml
from crosstune.report.files import RunFiles, load_run, number
from crosstune.runs.trials import (
    TrialProcess,
    log_of,
    options_file,
    ran_out_of_memory,
    wait_until_free,
    why_ended,
)

SLOWEST_LEFT_OUT = 0.1
"""Fraction of the measured steps that is dropped: the slowest, while another process had the machine."""
MIN_TO_DROP_FROM = 5
"""With fewer measured steps, none is dropped."""
_NOT_IN_JSON = ("warmup", "rows", "on_one_cpu")
Status = Literal["finished", "out_of_memory", "failed", "too_slow"]


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
        dropped = math.ceil(len(measured) * SLOWEST_LEFT_OUT) if len(measured) >= MIN_TO_DROP_FROM else 0
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
        wait_until_free(folder, limit_s=self.limit_s, should_stop=self.should_stop)
        if (done := self.read_finished(folder, asked)) is not None:
            return done
        if folder.exists():
            remove_folder(folder)
        begun = time.monotonic()
        code = self._wait(TrialProcess(folder, asked))
        return self._read(name, code=code, seconds=time.monotonic() - begun)

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

    def _wait(self, process: TrialProcess) -> int | None:
        """Return the exit code of a trial; None if it exceeded `limit_s`. Raise KeyboardInterrupt on a stop."""
        ends_at = time.monotonic() + self.limit_s
        try:
            while (code := process.code) is None and time.monotonic() <= ends_at:
                if self.should_stop():
                    raise KeyboardInterrupt
                time.sleep(0.1)
            return code
        finally:
            process.end()

    def read_finished(self, folder: Path, asked: Mapping[str, Any]) -> Trial | None:
        """Return a trial that finished earlier with the same options and intact files."""
        try:
            before = read_yaml(options_file(folder))
            run = load_run(folder)
        except (OSError, UserError):
            return None
        damaged = run.problems or not run.plan  # the rungs need the plan
        if before != dict(asked) or damaged or run.summary.get("status") != "finished":
            return None
        seconds = number(run.summary.get("seconds")) or 0.0
        found = self._read(folder.name, code=0, seconds=seconds)
        return found if found.finished else None

    def _read(self, name: str, *, code: int | None, seconds: float) -> Trial:
        folder, run = self.folder / name, RunFiles(folder=self.folder / name)
        with contextlib.suppress(UserError):  # it failed before it had a folder
            run = load_run(folder)
        if code == EXIT_STOPPED and self.should_stop():
            raise KeyboardInterrupt
        status, error = self._judge(code, run)
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

    def _judge(self, code: int | None, run: RunFiles) -> tuple[Status, str]:
        """Return the status of a trial, and why it did not finish."""
        if code is None:
            return "too_slow", f"it ran longer than {self.limit_s:g} s and was stopped"
        if code == 0:
            if len(run.metrics) >= self.steps:
                return "finished", ""
            return "failed", f"it ended after {len(run.metrics)} of {self.steps} steps"
        status: Status = "out_of_memory" if ran_out_of_memory(run.events) else "failed"
        return status, why_ended(code, log_of(run.folder))


def median(values: Sequence[float]) -> float:
    """Return the median; NaN if there are no values."""
    return statistics.median(values) if values else math.nan
