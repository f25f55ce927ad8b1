"""Observe a run for its trackers: send them its values, and report where these go and which tracker failed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from crosstune.config.load import launch_variables
from crosstune.config.log_targets import trackers_in
from crosstune.config.schema import Config
from crosstune.core.errors import readable
from crosstune.core.events import (
    Evaluated,
    Event,
    Observer,
    Observers,
    StepMetrics,
    Warned,
)
from crosstune.core.names import load_plugin
from crosstune.core.record import RecordFailed
from crosstune.core.secrets import HIDDEN
from crosstune.core.tracking_events import TrackingFailed, TrackingStarted, TrackingWaits
from crosstune.tracking.channel import Channel
from crosstune.tracking.values import EVAL, TEST, TRAIN, numbers, plain, table_rows, tracked_config

PACKAGE = "crosstune.tracking.trackers"
WAIT_S = 60.0
"""Time at the end of a run for all trackers together."""
STOPPED_WAIT_S = 20.0
"""The same for a run that was stopped: a scheduler may end its process soon."""
QUIET_S = 2.0
"""Wait this long without a word."""
_NAMES_OF_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSW", re.I)


class Tracking:
    """The trackers of one run, of which there may be none. No call waits for a tracker, except `close`."""

    def __init__(self) -> None:
        self._channels: list[Channel] = []
        self._report: Observer = Observers()
        self._step = 0
        self._wait_s = WAIT_S
        self._closing = False
        self._runs = Path()
        """The folder of all runs, as the user named it."""

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
        """Start the trackers of --log_to. `described` is plan.json, `report` receives what becomes of them.

        A run that is resumed passes the last step before, and `earlier`, the folder with the values until then.
        """
        self._report, self._step, self._runs = report, resumes_at, folder.parent
        run = {
            "name": folder.name,
            "project": config.project_name,
            "project_asked": "project_name" in config.asked,
            "entity": config.entity,
            "group": config.group,
            "folder": str(folder.absolute()),
            "resumes_at": resumes_at,
            "config": tracked_config(described),
            "process": os.getpid(),
        }
        for name in trackers_in(config.log_to):
            module = load_plugin(PACKAGE, name, kind="tracker")
            assert module.__file__ is not None
            channel = Channel(name, Path(module.__file__), variables=module.ENVIRONMENT)
            start = {"kind": "start", "tracker": name, "run": run, "in_place": in_place}
            channel.send(start | {"earlier": str(earlier.absolute()) if earlier is not None else None})
            self._channels.append(channel)

    def on_step(self, metrics: StepMetrics) -> None:
        if self._channels:
            self._step = metrics["step"]
            self._log(TRAIN, metrics, step=metrics["step"])

    def on_event(self, event: Event) -> None:
        if not self._channels:
            return
        if isinstance(event, Evaluated):
            self._log(EVAL, event.metrics, step=event.step, samples=event.samples)
        else:
            self._report_news()

    def log_test(self, metrics: Mapping[str, Any], worst: Sequence[Mapping[str, Any]]) -> None:
        """Log the metrics of a test after the training, and the items that went worst."""
        self._log(TEST, metrics, step=self._step, worst=worst)

    def summarize(self, summary: Mapping[str, Any]) -> None:
        """Send the summary of the run, which trackers take when they are closed."""
        self._wait_s = WAIT_S if summary.get("status") == "finished" else STOPPED_WAIT_S
        message = {"kind": "summary", "summary": plain(summary)}
        for channel in self._channels:
            channel.send(message)

    def close(self) -> None:
        """End the trackers, and wait a while for what they have not sent yet."""
        self._closing = True
        for channel in self._channels:
            channel.send_end()
        try:
            self._wait()
        except KeyboardInterrupt:  # the run itself is complete
            why = "Ctrl-C ended the wait for it"
        else:
            why = f"it has not finished within {self._wait_s:g} s"
        for channel in self._channels:
            channel.give_up(why)
        self._report_news()
        self._channels = []

    def _wait(self) -> None:
        started = time.monotonic()
        said = False
        for channel in self._channels:
            while not channel.wait(0.1) and (waited := time.monotonic() - started) < self._wait_s:
                self._report_news()
                if waited > QUIET_S and not said:
                    said = True
                    late = [each.name for each in self._channels if not each.ended.is_set()]
                    self._tell(TrackingWaits(trackers=late, seconds=self._wait_s))

    def _log(self, kind: str, metrics: Mapping[str, Any], *, step: int, **tables: Any) -> None:
        if self._channels:
            rows = {name: table_rows(found) for name, found in tables.items() if found}
            values = numbers(kind, metrics)
            message = {"kind": "values", "of": kind, "step": step, "values": values, "tables": rows}
            for channel in self._channels:
                channel.send_values(message)
            self._report_news()

    def _report_news(self) -> None:
        for channel in self._channels:
            while not channel.replies.empty():
                self._report_reply(channel.name, channel.replies.get())

    def _report_reply(self, tracker: str, reply: Mapping[str, Any]) -> None:
        if reply["kind"] == "started":
            where, view = (self._as_named(_hidden(reply[name])) for name in ("where", "view"))
            self._tell(TrackingStarted(tracker=tracker, where=where, view=view))
        elif reply["kind"] == "warned":
            self._tell(Warned(message=f"{tracker}: {_hidden(reply['text'])}"))
        elif reply["kind"] == "failed":
            self._tell(
                TrackingFailed(
                    tracker=tracker, error=self._as_named(_hidden(reply["error"])), step=self._step
                )
            )

    def _tell(self, event: Event) -> None:
        """Report an event. The record may fail during the run, but not a run that has ended."""
        with contextlib.suppress(*(RecordFailed,) * self._closing):
            self._report.on_event(event)

    def _as_named(self, text: str) -> str:
        """Return a text with paths as the user named them, which are shorter."""
        return text.replace(str(self._runs.absolute()), str(self._runs))


def _hidden(text: str) -> str:
    """Return a text of a tracker without the keys and tokens of the environment."""
    for name, value in launch_variables().items():
        if len(value) >= 8 and _NAMES_OF_SECRETS.search(name):
            text = text.replace(value, HIDDEN)
    return readable(text)
