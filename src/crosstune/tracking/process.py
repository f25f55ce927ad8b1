"""The program of a tracker's process: take messages from the training, pass them to the tracker, say how it goes."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from crosstune.tracking.logged import Logged, earlier_values
from crosstune.tracking.tracker import TrackedRun, Tracker, Unavailable

LEAVE_S = 60.0
"""Time to finish after the training is gone, and to leave after a failure."""
MOST_WARNINGS = 3


class Following:
    """A tracker that follows one run."""

    def __init__(self, tracker: Tracker, replies: IO[bytes]) -> None:
        self.tracker, self._replies = tracker, replies
        self.logged: Logged | None = None
        self._warned: set[str] = set()

    def reply(self, kind: str, **facts: Any) -> None:
        try:
            self._replies.write(json.dumps({"kind": kind, **facts}).encode() + b"\n")
        except BrokenPipeError:  # the training is gone
            return

    def warn(self, message: Warning | str, category: type[Warning], *rest: Any, **facts: Any) -> None:
        """Pass on the first warnings of a tracker; those of other kinds are about the insides of libraries."""
        text = str(message)
        if category is UserWarning and text not in self._warned and len(self._warned) < MOST_WARNINGS:
            self._warned.add(text)
            self.reply("warned", text=text)

    def start(self, message: dict[str, Any]) -> None:
        facts = message["run"] | {"folder": Path(message["run"]["folder"])}
        run, tracker = TrackedRun(**facts, id="", continues=False), self.tracker
        target = f"{run.entity or ''}/{run.project}"
        logged = Logged.open(run.folder, message["tracker"], target=target, in_place=message["in_place"])
        if tracker.repeats:
            logged.rewind(run.resumes_at)
        place = tracker.start(TrackedRun(**facts, id=logged.id, continues=logged.continues))
        logged.write()
        self.logged = logged
        self.reply("started", where=place.where, view=place.view)
        self._folder = run.folder
        if (earlier := message["earlier"]) is not None:
            self.log_earlier(Path(earlier), until=run.resumes_at)

    def log_earlier(self, folder: Path | None = None, *, until: int) -> None:
        """Log what the files of a run have up to a step."""
        for earlier in earlier_values(folder or self._folder, until=until):
            self.log(earlier.kind, earlier.values, step=earlier.step, tables=earlier.tables)

    def log(self, kind: str, values: dict[str, float], *, step: int, tables: Mapping[str, Any]) -> None:
        """Log values and tables of a step, unless the tracker has them from before a resume."""
        assert self.logged is not None
        if not self.logged.is_new(kind, step):
            return
        if values:
            self.tracker.log(values, step=step)
        for name, rows in tables.items():
            if rows:
                self.tracker.log_rows(f"{kind}/{name}", rows, step=step)
        self.logged.add(kind, step)

    def finish(self, summary: dict[str, Any]) -> None:
        assert self.logged is not None
        self.logged.write()
        self.tracker.finish(summary, succeeded=summary.get("status") == "finished")
        self.reply("finished")


def follow(following: Following, messages: Iterator[bytes]) -> None:
    """Handle messages until the end. Without an end the training was killed."""
    summary: dict[str, Any] = {}
    for line in messages:
        if not line.endswith(b"\n"):  # the training was killed while it wrote
            continue
        message = json.loads(line)
        kind = message.pop("kind")
        if kind == "start":
            following.start(message)
        elif kind == "values":
            following.log(message.pop("of"), message.pop("values"), **message)
        elif kind == "earlier":
            following.log_earlier(until=message["until"])
        elif kind == "summary":
            summary = message["summary"]
        elif kind == "end":
            break
    else:
        _leave_in_time()
    if following.logged is not None:
        following.finish(summary)


def main() -> None:
    """Run the tracker in the file of the first argument."""
    # Whatever a tracker reads or prints must not mix with the messages: no prompt can wait for an answer.
    messages, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    following = Following(load_tracker(Path(sys.argv[1])), replies)
    warnings.showwarning = following.warn
    try:
        follow(following, iter(messages.readline, b""))
    except BaseException as error:
        text = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
        following.reply("failed", error=text)
        _leave_in_time(5.0)
        raise
    _leave_in_time(5.0)


def load_tracker(file: Path) -> Tracker:
    spec = importlib.util.spec_from_file_location(f"crosstune.tracking.trackers.{file.stem}", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tracker: Tracker = module.Tracker()
    return tracker


def _leave_in_time(seconds: float = LEAVE_S) -> None:
    """End the process after a while, whatever the tracker's own threads and exit handlers wait for."""
    leaving = threading.Timer(seconds, os._exit, [1])
    leaving.daemon = True
    leaving.start()
