"""Run the trials of a sweep, stop poor ones, and record each outcome, so that a killed sweep continues."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.config.load import visible_devices
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import EXIT_AT_ONCE, EXIT_DONE, EXIT_STOPPED, UserError
from crosstune.core.events import Evaluated
from crosstune.distributed.launch import ORPHAN_S
from crosstune.files.atomic_files import remove_folder
from crosstune.files.json_files import read_object, write_json
from crosstune.files.run_record import read_log
from crosstune.report.files import last_change, last_rows, load_run, mapping, number
from crosstune.report.outcome import result_metrics
from crosstune.report.trial_pages import STATUSES, SWEEP_FILE
from crosstune.runs.trials import STOP_S, TrialProcess, wait_until_free, why_ended
from crosstune.sweep.choose import Space, Status, Trial, choose, importances, pruned_at

POLL_S = 0.2
RESTARTS = 3
"""Starts after a kill, for each trial."""
MOST_FAILURES = 3
"""Failed trials after which a sweep stops if none has finished."""
_EVENTS_BYTES, _LAST_ROW_BYTES = 1 << 24, 1 << 13


def device_slots(plan: Plan, parallel: int | None) -> list[dict[str, str]]:
    """Return the environment variables of each concurrent trial, which give it its own devices as long as there are enough."""
    variable, each = backend_specs()[plan.backend.name].visible_devices, max(1, plan.world_size)
    devices = visible_devices(variable, count=len(plan.backend.devices)) if variable else []
    groups = [devices[at : at + each] for at in range(0, len(devices) - each + 1, each)]
    if len(groups) < 2:
        return [{} for _ in range(parallel or 1)]
    return [{variable: ",".join(groups[place % len(groups)])} for place in range(parallel or len(groups))]


@dataclass(kw_only=True)
class Sweep:
    """The finished and running trials of a sweep."""

    folder: Path
    space: Space
    metric: str
    """The evaluated metric, without `eval_`."""
    maximize: bool
    num_trials: int
    asked: Mapping[str, Any]
    """The options of all trials."""
    seed: int
    prunes: bool
    slots: Sequence[Mapping[str, str]]
    """Environment variables for each of the concurrent trials."""
    should_stop: Callable[[], bool] = lambda: False
    on_start: Callable[[Trial], None] = lambda trial: None
    on_end: Callable[[Trial], None] = lambda trial: None
    on_poll: Callable[[], None] = lambda: None
    """Called several times a second."""
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._running: dict[int, tuple[Trial, TrialProcess]] = {}
        """Slot -> trial."""
        self._restarts, self._seen = Counter[int](), dict[int, float | None]()
        self._names: set[str] = set()
        path = self.folder / SWEEP_FILE
        if path.is_file() and (self.folder / "trials").is_dir():
            self.trials = _read_trials(path, self.space)
        for trial in self.trials:
            if trial.status == "failed":  # the cause may be gone
                trial.status, trial.error = "started", ""

    @property
    def ranked(self) -> list[Trial]:
        """The trials, the best first."""
        sign = -1 if self.maximize else 1
        return sorted(
            self.trials, key=lambda t: (STATUSES.index(t.status), sign * (t.value or 0.0), t.number)
        )

    @property
    def best(self) -> Trial | None:
        return next((trial for trial in self.ranked if trial.status == "finished"), None)

    def ended(self, *statuses: Status) -> list[Trial]:
        return [
            trial for trial in self.trials if trial.status in (statuses or ("finished", "pruned", "failed"))
        ]

    def run(self) -> None:
        """Run the trials that have not ended. Raise KeyboardInterrupt when stopped; the same sweep continues later."""
        try:
            while self._start_trials() or self._running:
                time.sleep(POLL_S)
                if self.should_stop():
                    raise KeyboardInterrupt
                for slot in list(self._running):
                    self._look(slot)
                self.on_poll()
        finally:
            for _, process in self._running.values():
                process.terminate()
            for _, process in self._running.values():
                process.end()
        self._check_failures(most=1)

    def steps_of_running(self) -> dict[str, tuple[int, int]]:
        """Return the steps done by each running trial, and its number of steps."""
        found = {}
        for trial, process in self._running.values():
            rows = last_rows(process.folder / "metrics.jsonl", limit=_LAST_ROW_BYTES)
            num_steps = number(read_log(process.folder / "plan.json").get("num_steps"))
            if rows and num_steps:
                found[trial.name] = int(number(rows[-1].get("step")) or 0), int(num_steps)
        return found

    def options_of(self, trial: Trial) -> dict[str, Any]:
        return {**self.asked, **trial.params}

    def to_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "metric": f"eval_{self.metric}",
            "goal": "max" if self.maximize else "min",
            "over": {name: vars(dimension) for name, dimension in self.space.items()},
            "best": best.name if best else None,
            "importance": importances(self.space, self.trials, maximize=self.maximize),
            "trials": [trial.to_json() for trial in self.ranked],
        }

    def write(self) -> None:
        write_json(self.folder / SWEEP_FILE, self.to_json())

    def _start_trials(self) -> bool:
        """Start trials in the free slots; return False if no trial was started."""
        started = False
        for slot in range(len(self.slots)):
            if slot not in self._running and (trial := self._next()) is not None:
                self._running[slot] = trial, self._open(trial, slot)
                self.on_start(trial)
                started = True
        return started

    def _next(self) -> Trial | None:
        """Return a trial that an earlier process left unfinished, or choose and record a new one; None if there are enough."""
        running = [trial.number for trial, _ in self._running.values()]
        left = [t for t in self.trials if t.status == "started" and t.number not in running]
        if left or len(self.trials) >= self.num_trials:
            return left[0] if left else None
        params = choose(self.space, self.trials, seed=self.seed, maximize=self.maximize)
        if params is None:
            return None
        known = [trial.number for trial in self.ended()]
        self.trials.append(Trial(number=len(self.trials), params=params, known=known))
        self.write()
        return self.trials[-1]

    def _open(self, trial: Trial, slot: int) -> TrialProcess:
        """Start or continue the run of a trial."""
        folder = self._folder_of(trial)
        wait_until_free(folder, limit_s=ORPHAN_S + STOP_S, should_stop=self.should_stop)
        if folder.is_dir() and not any((folder / CHECKPOINTS).glob("step-*")):
            remove_folder(folder)  # there is nothing to continue from
        own = {"name": trial.name, "output_dir": str(folder.parent), "resume": "auto"}
        return TrialProcess(folder, {**self.options_of(trial), **own}, variables=self.slots[slot])

    def _folder_of(self, trial: Trial) -> Path:
        return self.folder / "trials" / trial.name

    def _look(self, slot: int) -> None:
        """Read the new output of a trial; stop a poor trial, and restart a killed one."""
        trial, process = self._running[slot]
        code = process.code  # before its last evaluations are read
        evaluations = self._read_evaluations(trial)
        others = [self.trials[place] for place in trial.known]
        step = pruned_at(evaluations, others, maximize=self.maximize) if self.prunes else None
        if step is not None:
            process.end()
            # It may have continued since: keep what decided, which is the same after a kill.
            trial.evaluations = {at: v for at, v in trial.evaluations.items() if int(at) <= step}
            self._end(slot, "pruned", step=step, value=evaluations[step])
        elif code == EXIT_DONE:
            self._finish(slot)
        elif code is None:
            return
        elif (code < 0 or code == EXIT_STOPPED or code >= EXIT_AT_ONCE) and (
            self._restarts[trial.number] < RESTARTS
        ):
            self._restarts[trial.number] += 1
            self._running[slot] = trial, self._open(trial, slot)
        else:
            self._end(slot, "failed", error=why_ended(code, process.log))
            self._check_failures(most=MOST_FAILURES)

    def _read_evaluations(self, trial: Trial) -> dict[int, float | None]:
        """Add a trial's evaluations during its training; raise a UserError if the first one lacks the metric."""
        path = self._folder_of(trial) / "events.jsonl"
        if (changed := last_change(path)) != self._seen.get(trial.number):
            self._seen[trial.number] = changed
            rows = [row for row in last_rows(path, limit=_EVENTS_BYTES) if row.get("kind") == Evaluated.kind]
            for row in rows:
                metrics = mapping(row.get("metrics"))
                self._names |= metrics.keys()
                if row.get("when") == "during" and isinstance(row.get("step"), int):
                    trial.evaluations[str(row.get("step"))] = number(metrics.get(self.metric))
            if self.metric not in self._names and any(row.get("when") != "before" for row in rows):
                self._refuse_metric()
        return {int(step): value for step, value in trial.evaluations.items()}

    def _refuse_metric(self) -> None:
        """Forget the first trials, which cannot be compared."""
        for _, process in self._running.values():
            process.end()
        self._running.clear()
        (self.folder / SWEEP_FILE).unlink(missing_ok=True)
        remove_folder(self.folder / "trials")
        names = ", ".join(f"eval_{name}" for name in sorted(self._names))
        raise UserError(
            f"No evaluation gives eval_{self.metric}.",
            why=f"the evaluations of this run give: {names or 'nothing, since no data is held out'}.",
            do="choose one of these with --metric"
            if names
            else "hold out data with --eval_dataset or --eval_samples",
        )

    def _finish(self, slot: int) -> None:
        run = load_run(self._running[slot][1].folder)
        value = number(result_metrics(run).get(self.metric))
        step = number(run.summary.get("result_step")) or run.last_step
        if value is None:
            self._end(slot, "failed", error=f"the evaluation of its result has no finite eval_{self.metric}")
            self._check_failures(most=MOST_FAILURES)
        else:
            self._end(slot, "finished", value=value, step=int(step))

    def _end(self, slot: int, status: Status, **outcome: Any) -> None:
        """Record the outcome of a trial, and remove the checkpoints of trials that are not the best."""
        trial, process = self._running.pop(slot)
        with contextlib.suppress(UserError):  # it may have failed before it had a folder
            trial.seconds = number(load_run(process.folder).summary.get("seconds")) or 0.0
        trial.status = status
        for name, value in outcome.items():
            setattr(trial, name, value)
        self.write()
        for other in self.ended("finished", "pruned"):
            if other is not self.best and (kept := self._folder_of(other) / CHECKPOINTS).is_dir():
                remove_folder(kept)
        self.on_end(trial)

    def _check_failures(self, *, most: int) -> None:
        failed = self.ended("failed")
        if len(failed) >= most and not self.ended("finished"):
            raise UserError(
                "No trial finished." if most == 1 else f"The first {len(failed)} trials failed.",
                why="; ".join(f"{trial.name}: {trial.error}" for trial in failed),
                do=f"remove the cause and run the command again, which tries them again; "
                f"their output is in {self.folder / 'trials'}",
            )


def _read_trials(path: Path, space: Space) -> list[Trial]:
    """Return the recorded trials; raise a UserError if the record is damaged."""
    try:
        rows = [{key: row[key] for key in row if key != "name"} for row in read_object(path)["trials"]]
        trials = sorted((Trial(**row) for row in rows), key=lambda trial: trial.number)
        if any(t.number != place or t.params.keys() != space.keys() for place, t in enumerate(trials)):
            raise ValueError("its trials do not fit the request")
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"The record of the sweep is damaged: {path}.",
            why=error.why if isinstance(error, UserError) else f"{error}.",
            do="use a different --name, or --overwrite true to begin again",
        ) from error
    return trials
