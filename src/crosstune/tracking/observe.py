"""Log a run's values to its trackers, each in a daemon thread with a bounded queue, so that none can stop the training."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.config.conditions import TRACKERS_PACKAGE, trackers_in
from crosstune.config.load import add_variables, launch_variables
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, readable
from crosstune.core.events import Evaluated, Event, Observer, Observers, StepMetrics
from crosstune.core.names import load_plugin
from crosstune.core.safe_text import HIDDEN
from crosstune.files.run_record import RecordFailed
from crosstune.process.this_process import TRACKER_THREAD, in_tracker_thread, note_unfinished
from crosstune.tracking.tracker import (
    TrackedRun,
    Tracker,
    TrackingFailed,
    TrackingStarted,
    TrackingWaits,
    Unavailable,
)
from crosstune.tracking.values import (
    EVAL,
    TEST,
    TRAIN,
    Logged,
    earlier_values,
    numbers,
    plain,
    table_rows,
    tracked_config,
)

CALL_S = 60.0
"""Time limit for one call of a tracker."""
WAIT_S = 60.0
"""Time limit for all trackers together at the end of a run."""
STOPPED_WAIT_S = 20.0
"""The same for a stopped run: a scheduler may kill its process soon."""
QUIET_S = 2.0
"""Wait this long before reporting the wait."""
MAX_QUEUED = 10_000
"""Maximum number of queued jobs per tracker; the values of further steps are read from the run folder later."""
_NAMES_OF_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.I)


def check_trackers(config: Config) -> None:
    """Raise a UserError for trackers of --log_to that are not installed."""
    names = trackers_in(config.log_to)
    packages = [load_plugin(TRACKERS_PACKAGE, name, kind="tracker").PACKAGE for name in names]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--log_to {config.log_to} needs packages that are not installed: {' and '.join(missing)}.",
            do=f"pip install {' '.join(missing)}; or all trackers: pip install 'crosstune[track]'",
        )


class Worker:
    """A tracker in its daemon thread; only this thread calls the tracker."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self._tracker = name, tracker
        self.ended = threading.Event()
        """Set once the tracker has finished, failed or been given up."""
        self.place: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.summary: dict[str, Any] = {}
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._logged: Logged | None = None
        self._left_out = 0
        """The last step dropped from a full queue."""
        self._calls_since: float | None = None
        threading.Thread(target=self._work, name=f"{TRACKER_THREAD}{name}", daemon=True).start()

    def start(self, run: Mapping[str, Any], *, in_place: bool, earlier: Path | None) -> None:
        self._jobs.put(functools.partial(self._start, run, in_place=in_place, earlier=earlier))

    def log(self, kind: str, values: dict[str, float], *, step: int, tables: Mapping[str, Any]) -> None:
        """Queue values; if the queue is full, read them from the run folder later."""
        if self.ended.is_set():
            return
        if self._jobs.qsize() >= (MAX_QUEUED // 2 if self._left_out else MAX_QUEUED):
            self._left_out = max(self._left_out, step)
            return
        self._recall_left_out()
        self._jobs.put(functools.partial(self._log, kind, values, step=step, tables=tables))

    def finish(self) -> None:
        self._recall_left_out()
        self._jobs.put(self._finish)

    def check_time(self) -> None:
        """Give up if the current call exceeds its time limit."""
        since = self._calls_since
        if since is not None and time.monotonic() - since > CALL_S:
            self.give_up(f"it did not answer within {CALL_S:g} s")

    def give_up(self, why: str) -> None:
        if not self.ended.is_set():
            self.ended.set()
            self._jobs = queue.SimpleQueue()
            self.errors.put(why)
            note_unfinished()

    def _recall_left_out(self) -> None:
        if self._left_out:
            self._jobs.put(functools.partial(self._log_earlier, None, until=self._left_out))
            self._left_out = 0

    def _work(self) -> None:
        try:
            while not self.ended.is_set():
                self._jobs.get()()
        except Unavailable as error:
            self.give_up(str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 (whatever a library raises, the training continues)
            self.give_up(f"{type(error).__name__}: {error}")

    def _call(self, function: Callable[..., Any], *values: Any, **named: Any) -> Any:
        self._calls_since = time.monotonic()
        try:
            return function(*values, **named)
        finally:
            self._calls_since = None

    def _start(self, facts: Mapping[str, Any], *, in_place: bool, earlier: Path | None) -> None:
        run = TrackedRun(**facts, id="", continues=False)
        target = f"{run.entity or ''}/{run.project}"
        logged = Logged.open(run.folder, self.name, target=target, in_place=in_place)
        if self._tracker.repeats:
            logged.rewind(run.resumes_at)
        run = TrackedRun(**facts, id=logged.id, continues=logged.continues)
        place = self._call(self._tracker.start, run)
        logged.write()
        self._folder, self._logged = run.folder, logged
        self.place.put((place.where, place.view))
        if earlier is not None:
            self._log_earlier(earlier, until=run.resumes_at)

    def _log_earlier(self, folder: Path | None, *, until: int) -> None:
        """Log the values in the files of a run up to a step."""
        for kind, step, values, tables in earlier_values(folder or self._folder, until=until):
            self._log(kind, values, step=step, tables=tables)

    def _log(self, kind: str, values: dict[str, float], *, step: int, tables: Mapping[str, Any]) -> None:
        """Log values and tables of a step, unless the tracker has them already."""
        assert self._logged is not None
        if self.ended.is_set() or not self._logged.is_new(kind, step):
            return
        if values:
            self._call(self._tracker.log, values, step=step)
        for name, rows in tables.items():
            if rows:
                self._call(self._tracker.log_rows, f"{kind}/{name}", rows, step=step)
        self._logged.add(kind, step, write=self._jobs.empty())

    def _finish(self) -> None:
        assert self._logged is not None
        self._logged.write()
        succeeded = self.summary.get("status") == "finished"
        self._call(self._tracker.finish, self.summary, succeeded=succeeded)
        self.ended.set()


class Tracking:
    """The trackers of one run. Only `close` waits for them."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._report: Observer = Observers()
        self._step = 0
        self._wait_s = WAIT_S
        self._closing = False
        self._runs = Path()
        """The parent of the run folder, as the user wrote it."""

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self,
        config: Config,
        described: Mapping[str, Any],
        *,
        folder: Path,
        report: Observer,
        in_place: bool = False,
        resumes_at: int = 0,
        earlier: Path | None = None,
    ) -> None:
        """Start the trackers of --log_to. `described` is the content of plan.json, `report` receives their events.

        For a resumed run, `resumes_at` is the last step before, and `earlier` the folder with the values up to it.
        """
        self._report, self._step, self._runs = report, resumes_at, folder.parent
        run = {
            "name": folder.name,
            "project": config.project_name,
            "project_asked": "project_name" in config.sources,
            "entity": config.entity,
            "group": config.tracker_group,
            "folder": folder.absolute(),
            "resumes_at": resumes_at,
            "config": tracked_config(described),
        }
        for name in trackers_in(config.log_to):
            module = load_plugin(TRACKERS_PACKAGE, name, kind="tracker")
            add_variables(module.ENVIRONMENT)
            worker = Worker(name, module.Tracker())
            worker.start(run, in_place=in_place, earlier=earlier.absolute() if earlier is not None else None)
            self._workers.append(worker)
        if self._workers and not isinstance(sys.stdin, _Input):
            sys.stdin = _Input(sys.stdin)

    def on_step(self, metrics: StepMetrics) -> None:
        self._step = metrics["step"]
        self._log(TRAIN, metrics, step=self._step)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Evaluated):
            self._log(EVAL, event.metrics, step=event.step, samples=event.samples)
        else:
            self._report_news()

    def log_test(self, metrics: Mapping[str, Any], worst: Sequence[Mapping[str, Any]]) -> None:
        """Log the metrics and the worst items of a test after training."""
        self._log(TEST, metrics, step=self._step, worst=worst)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Keep the run's summary for `close`."""
        self._wait_s = WAIT_S if summary.get("status") == "finished" else STOPPED_WAIT_S
        for worker in self._workers:
            worker.summary = plain(summary)

    def close(self) -> None:
        """Finish the trackers, and wait a limited time for their last uploads."""
        self._closing = True
        for worker in self._workers:
            worker.finish()
        try:
            self._wait()
            why = f"it did not finish within {self._wait_s:g} s"
        except KeyboardInterrupt:  # the run itself is complete
            why = "Ctrl-C ended the wait for it"
        for worker in self._workers:
            worker.give_up(why)
        self._report_news()
        self._workers = []
        if isinstance(sys.stdin, _Input):
            sys.stdin = sys.stdin.stream

    def _wait(self) -> None:
        started = time.monotonic()
        said = False
        for worker in self._workers:
            while not worker.ended.wait(0.1) and (waited := time.monotonic() - started) < self._wait_s:
                self._report_news()
                if waited > QUIET_S and not said:
                    said = True
                    late = [each.name for each in self._workers if not each.ended.is_set()]
                    self._tell(TrackingWaits(trackers=late, seconds=self._wait_s))

    def _log(self, kind: str, metrics: Mapping[str, Any], *, step: int, **tables: Any) -> None:
        if self._workers:
            rows = {name: table_rows(found) for name, found in tables.items() if found}
            values = numbers(kind, metrics)
            for worker in self._workers:
                worker.log(kind, values, step=step, tables=rows)
            self._report_news()

    def _report_news(self) -> None:
        for worker in self._workers:
            worker.check_time()
            while not worker.place.empty():
                where, view = map(self._shown, worker.place.get())
                self._tell(TrackingStarted(tracker=worker.name, where=where, view=view))
            while not worker.errors.empty():
                error = self._shown(worker.errors.get())
                self._tell(TrackingFailed(tracker=worker.name, error=error, step=self._step))

    def _tell(self, event: Event) -> None:
        """Report an event; once the run has ended, ignore a failing record."""
        with contextlib.suppress(*(RecordFailed,) * self._closing):
            self._report.on_event(event)

    def _shown(self, text: str) -> str:
        """Return a tracker's text with paths as the user wrote them, and without keys and tokens from the environment."""
        for name, value in launch_variables().items():
            if len(value) >= 8 and _NAMES_OF_SECRETS.search(name):
                text = text.replace(value, HIDDEN)
        return readable(text).replace(str(self._runs.absolute()), str(self._runs))


class _Input:
    """Standard input that is empty for trackers: none may prompt for a key during training."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(_nothing() if in_tracker_thread() else self.stream, name)


@functools.cache
def _nothing() -> Any:
    return Path(os.devnull).open(encoding="utf-8")
