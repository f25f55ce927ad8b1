"""Select the values that trackers receive, without secrets, and remember the last step that each tracker has."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Evaluated
from crosstune.core.safe_text import redact, redact_values
from crosstune.files.json_files import finite, read_json, read_jsonl, write_json

TRAIN, EVAL, TEST = "train", "eval", "test"
LONGEST_CELL = 4000
"""Maximum characters per table cell."""
MAX_ROWS = 200
"""Maximum rows per table."""
_PLAN_FIELDS = (
    "options",
    "backend",
    "engine",
    "device",
    "method",
    "quantizer",
    "n_bits",
    "precision",
    "world_size",
    "attention",
    "num_steps",
)
_DATA_FIELDS = ("dataset", "format", "context_length", "train", "eval", "identity", "scale", "labels")


def numbers(kind: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics with keys such as `train/loss`."""
    return {
        f"{kind}/{name}": int(value) if isinstance(value, bool) else value
        for name, value in metrics.items()
        if name != "step" and isinstance(value, (int, float))
    }


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return table rows with equal columns, in valid UTF-8 and without secrets."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: _cell(row.get(name)) for name in columns} for row in rows[:MAX_ROWS]]


def tracked_config(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of plan.json for trackers: options, model, data, backend and versions, but not the machine's name, the
    command or the environment."""
    model, data, machine = (described.get(name) or {} for name in ("model", "data", "machine"))
    chosen = {name: described.get(name) for name in _PLAN_FIELDS}
    chosen["model"] = {name: model[name] for name in ("name", "source") if name in model}
    chosen["data"] = {name: data[name] for name in _DATA_FIELDS if name in data}
    return plain(chosen | {"versions": machine.get("versions")})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in JSON types and valid UTF-8, without secrets."""
    made = _encodable(redact_values(finite(values)))
    assert isinstance(made, dict)
    return made


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _cell(value: Any) -> Any:
    value = finite(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):  # such as the intermediate states of a denoised text
        value = "\n".join(map(str, value))
    # Cut before the slow search for secrets, but leave a margin so as not to cut through one.
    text = redact(str(value)[: LONGEST_CELL + 500])
    if len(text) > LONGEST_CELL:
        text = f"{text[:LONGEST_CELL]} ..."
    return _encodable(text)


FOLDER = "tracking"
"""Folder in the run folder with one file per tracker."""
_WRITE_S = 1.0


@dataclass
class Logged:
    """A tracker's id of a run, and its last step for each kind of values."""

    path: Path
    id: str
    target: str
    """Owner and project; a different project gets a new run."""
    continues: bool = False
    steps: dict[str, int] = field(default_factory=dict)
    _written: float = 0.0

    @classmethod
    def open(cls, run: Path, tracker: str, *, target: str, in_place: bool) -> Logged:
        """Read the record of a tracker; make a new one for a run that does not continue in its folder."""
        path, known = run / FOLDER / f"{tracker}.json", {}
        with contextlib.suppress(UserError):
            known = read_json(path) if in_place else {}
        if known.get("target") != target or not isinstance(known.get("id"), str):
            return cls(path=path, id=uuid.uuid4().hex[:16], target=target)
        found = known["steps"] if isinstance(known.get("steps"), dict) else {}
        steps = {str(kind): step for kind, step in found.items() if isinstance(step, int)}
        return cls(path=path, id=known["id"], target=target, continues=True, steps=steps)

    def rewind(self, step: int) -> None:
        """Forget later steps, to log them again."""
        self.steps = {kind: min(last, step) for kind, last in self.steps.items()}

    def is_new(self, kind: str, step: int) -> bool:
        return step > self.steps.get(kind, -1)

    def add(self, kind: str, step: int, *, write: bool) -> None:
        """Note a step; write the record if `write` is set or the last write is a second ago."""
        self.steps[kind] = max(step, self.steps.get(kind, -1))
        if write or time.monotonic() - self._written > _WRITE_S:
            self.write()

    def write(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        write_json(self.path, {"id": self.id, "target": self.target, "steps": self.steps})
        self._written = time.monotonic()


def earlier_values(run: Path, *, until: int) -> Iterator[tuple[str, int, dict[str, float], dict[str, Any]]]:
    """Yield kind, step, values and tables of a run up to a step, in order; an evaluation follows its step."""
    steps = _by_step(run / "metrics.jsonl")
    evaluations = _by_step(run / "events.jsonl", kind=Evaluated.kind)
    for step in sorted(step for step in {*steps, *evaluations} if step <= until):
        if step in steps:
            yield TRAIN, step, numbers(TRAIN, steps[step]), {}
        if (found := evaluations.get(step)) is not None:
            tables = {"samples": table_rows(found.get("samples") or [])}
            yield EVAL, step, numbers(EVAL, found.get("metrics") or {}), tables


def _by_step(path: Path, *, kind: str | None = None) -> dict[int, dict[str, Any]]:
    """Return the last row of each step in a log; none if it is damaged, since the run itself reports that."""
    try:
        rows = read_jsonl(path)
    except UserError:
        return {}
    return {row["step"]: row for row in rows if isinstance(row.get("step"), int) and row.get("kind") == kind}
