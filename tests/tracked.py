"""Trackers made for a test: plant their code beside the real ones, and read what they were given."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from crosstune.core.events import Event, StepMetrics

RECORDING = """
import json
from pathlib import Path
from crosstune.tracking.tracker import Place

PACKAGE = "json"
ENVIRONMENT = {}

class Tracker:
    repeats = False

    def note(self, **facts):
        with self.path.open("a") as file:
            file.write(json.dumps(facts) + "\\n")

    def start(self, run):
        self.path = run.folder / "NAME.notes"
        self.note(do="start", name=run.name, project=run.project, id=run.id, continues=run.continues,
                  resumes_at=run.resumes_at, config=run.config, group=run.group)
        return Place(where=str(self.path), view=f"cat {self.path}")

    def log(self, values, *, step):
        self.note(do="log", step=step, values=values)

    def log_rows(self, name, rows, *, step):
        self.note(do="rows", step=step, name=name, rows=rows)

    def finish(self, summary, *, succeeded):
        self.note(do="finish", summary=summary, succeeded=succeeded)
"""
"""A tracker that writes every call into a file of the run folder."""


@contextmanager
def planted(folder: Path, **codes: str) -> Iterator[None]:
    """Add trackers: each name has the code of its file, in which NAME stands for it."""
    from crosstune.tracking import trackers

    folder.mkdir(exist_ok=True)
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(code.replace("NAME", name), encoding="utf-8")
    trackers.__path__.append(str(folder))
    try:
        yield
    finally:
        trackers.__path__.remove(str(folder))
        for name in codes:
            sys.modules.pop(f"{trackers.__name__}.{name}", None)


def notes(run: Path, name: str = "notes", *, do: str | None = None) -> list[dict[str, Any]]:
    """Return the calls that a recording tracker had."""
    rows = [json.loads(line) for line in (run / f"{name}.notes").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if do is None or row["do"] == do]


class Seen:
    """An observer that keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def on_step(self, metrics: StepMetrics) -> None:
        return None

    def of(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]
