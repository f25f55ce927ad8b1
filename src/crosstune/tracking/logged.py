"""Remember which steps a tracker has, so that a resumed run continues there without gaps and without doubled steps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Evaluated
from crosstune.core.json_files import read_json, read_jsonl, write_json
from crosstune.tracking.values import EVAL, TRAIN, numbers, table_rows

FOLDER = "tracking"
"""The folder in a run with a file for each tracker."""
_WRITE_S = 1.0


@dataclass
class Logged:
    """The identity of a run with a tracker, and the last step that it has of each kind of values."""

    path: Path
    id: str
    target: str
    """The project and its owner: another project gets a run of its own."""
    continues: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    _written: float = 0.0

    @classmethod
    def open(cls, run: Path, tracker: str, *, target: str, in_place: bool) -> Logged:
        """Read what a tracker has of a run; a run that does not continue in its folder is new to the tracker."""
        path = run / FOLDER / f"{tracker}.json"
        known = _read(path) if in_place else {}
        if known.get("target") == target and isinstance(known.get("id"), str):
            steps = known.get("steps")
            found = steps if isinstance(steps, dict) else {}
            steps = {str(kind): step for kind, step in found.items() if isinstance(step, int)}
            return cls(path=path, id=known["id"], target=target, continues=True, steps=steps)
        return cls(path=path, id=uuid.uuid4().hex[:16], target=target)

    def rewind(self, step: int) -> None:
        """Forget the steps after this one: the tracker replaces them."""
        self.steps = {kind: min(last, step) for kind, last in self.steps.items()}

    def is_new(self, kind: str, step: int) -> bool:
        return step > self.steps.get(kind, -1)

    def add(self, kind: str, step: int, *, write: bool) -> None:
        """Note a step; store it now if `write` or the last write is a while ago."""
        self.steps[kind] = max(step, self.steps.get(kind, -1))
        if write or time.monotonic() - self._written > _WRITE_S:
            self.write()

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, {"id": self.id, "target": self.target, "steps": self.steps})
        self._written = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """Values that the files of a run have."""

    kind: str
    step: int
    values: dict[str, float]
    tables: Mapping[str, Any]


def earlier_values(run: Path, *, until: int) -> Iterator[Earlier]:
    """Yield the values of a run up to a step, in order; an evaluation comes after its step."""
    evaluations: dict[int, Mapping[str, Any]] = {}
    for row in _rows(run / "events.jsonl"):
        if row.get("kind") == Evaluated.kind and isinstance(row.get("step"), int):
            evaluations[row["step"]] = row
    steps = {row["step"]: row for row in _rows(run / "metrics.jsonl") if isinstance(row.get("step"), int)}
    for step in sorted({*steps, *evaluations}):
        if step > until:
            return
        if step in steps:
            yield Earlier(kind=TRAIN, step=step, values=numbers(TRAIN, steps[step]), tables={})
        if (found := evaluations.get(step)) is not None:
            tables = {"samples": table_rows(found.get("samples") or [])}
            values = numbers(EVAL, found.get("metrics") or {})
            yield Earlier(kind=EVAL, step=step, values=values, tables=tables)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a log; none of a damaged one, which the run itself reports."""
    try:
        return read_jsonl(path)
    except UserError:
        return []


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except UserError:
        return {}
