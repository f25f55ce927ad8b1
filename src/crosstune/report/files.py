"""Read a run folder, tolerating missing and damaged files, and detect an active run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from crosstune.core.errors import UserError
from crosstune.core.events import Adjusted, Event
from crosstune.files.json_files import parse_json, read_jsonl, read_object
from crosstune.files.paths import RUNS, missing_run
from crosstune.files.plain_files import MissingFile, UnreadableFile, open_plain
from crosstune.files.run_lock import is_held
from crosstune.files.run_record import RUN_FILES
from crosstune.files.yaml_files import read_yaml

IDENTIFYING_FILES = ("plan.json", "config.yaml")
"""A run folder has at least one of these."""
LARGEST = 1e300
"""Larger numbers count as infinite, because their sums and differences overflow."""
_PAGE_BYTES = 1 << 12
_EVENT_BYTES = 1 << 18
"""Enough for the last event with its samples."""
SMALLEST = 1e-290
"""Smaller numbers count as zero, because their inverses overflow."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The contents of a run folder. A missing file is an empty value, and is listed in `missing`."""

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Mapping[str, Any]] = ()
    """One row per step, ordered by step."""
    events: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Why existing files could not be read."""
    num_repeated_steps: int = 0
    """Rows dropped because the run was resumed from an earlier step."""
    is_sampled: bool = False
    """True if `metrics` is a part of the steps, taken evenly from a large file."""
    read_time: float = 0.0

    @property
    def name(self) -> str:
        return str(self.plan.get("name") or self.summary.get("name") or self.folder.name)

    @property
    def asked(self) -> Mapping[str, Any]:
        inherited = listed(self.plan.get("inherited"))
        asked = mapping(self.plan.get("asked")) or self.config
        return {name: value for name, value in asked.items() if name not in inherited}

    @property
    def last_step(self) -> int:
        last = self.metrics[-1]["step"] if self.metrics else self.summary.get("steps")
        return int(number(last) or 0)

    def events_of(self, event: type[Event]) -> list[Mapping[str, Any]]:
        return [row for row in self.events if row.get("kind") == event.kind]


def load_run(run_dir: Path, *, most_bytes: int | None = None) -> RunFiles:
    """Read a run folder; the run may be finished, killed or active. With `most_bytes`, a larger metrics.jsonl is sampled."""
    folder = run_dir.absolute()
    if not folder.exists():
        raise missing_run(run_dir)
    present = [name for name in RUN_FILES if (folder / name).is_file()]
    if not any(name in present for name in IDENTIFYING_FILES):
        if (folder / "trials").is_dir():
            kind = "sweep" if (folder / "sweep.json").is_file() else "ladder"
            raise UserError(
                f"{run_dir} is a {kind}, not a run.",
                do=f"open {run_dir / kind}.html, or specify one of the runs in {run_dir / 'trials'}",
            )
        same_name = Path(RUNS) / run_dir.name
        is_meant = run_dir.parent == Path() and same_name.is_dir()
        raise UserError(
            f"{run_dir} is not a run folder.",
            why=f"it has neither {' nor '.join(IDENTIFYING_FILES)}.",
            do=f"specify {same_name}" if is_meant else f"specify a run folder, such as {RUNS}/<name>",
        )
    problems: list[str] = []
    path = folder / "metrics.jsonl"
    is_sampled = most_bytes is not None and size_of(path) > most_bytes
    rows = sample_rows(path, most_bytes=most_bytes or 0) if is_sampled else _read_rows(path, problems)
    metrics = rewind(rows)
    return RunFiles(
        folder=folder,
        config=read_mapping(folder / "config.yaml", problems),
        plan=read_mapping(folder / "plan.json", problems),
        metrics=metrics,
        events=_read_rows(folder / "events.jsonl", problems),
        summary=read_summary(folder, problems),
        missing=tuple(name for name in RUN_FILES if name not in present),
        problems=tuple(problems),
        num_repeated_steps=0 if is_sampled else len(rows) - len(metrics),
        is_sampled=is_sampled,
        read_time=time.time(),
    )


def rewind(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows ordered by step. A row replaces earlier rows of its step and later: the run was resumed there."""
    kept: list[tuple[float, Mapping[str, Any]]] = []
    for row in rows:
        step = number(row.get("step"))
        if step is None:
            continue
        while kept and kept[-1][0] >= step:
            kept.pop()
        kept.append((step, row))
    return [row for _, row in kept]


def number(value: Any) -> float | None:
    """Return the value as a float when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if abs(value) < SMALLEST:
        return 0.0
    return float(value) if abs(value) <= LARGEST else None


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_adjustment(event: Mapping[str, Any]) -> bool:
    return event.get("kind") == Adjusted.kind


def _read_rows(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    try:
        return list(read_jsonl(path))
    except UserError as error:
        problems.append(f"{path.name} could not be read: {error}")
        return []


def read_mapping(path: Path, problems: list[str]) -> Mapping[str, Any]:
    try:
        data = read_object(path) if path.suffix == ".json" else read_yaml(path)
    except MissingFile:
        return {}
    except UserError as error:
        problems.append(f"{path.name} could not be read: {error.why}")
        return {}
    if not isinstance(data, Mapping):
        problems.append(f"{path.name} does not contain a mapping.")
        return {}
    return {str(key): value for key, value in data.items()}


def read_summary(folder: Path, problems: list[str]) -> Mapping[str, Any]:
    """Return the summary of a run; empty if it is of an earlier part: a resumed run writes it again when it ends."""
    summary, plan = last_change(folder / "summary.json"), last_change(folder / "plan.json")
    if summary is not None and plan is not None and plan > summary:
        # A copied folder has times in any order, but no event from after its copy.
        [*_, event] = last_rows(folder / "events.jsonl", limit=_EVENT_BYTES) or [{}]
        if (number(event.get("time")) or 0.0) > summary or is_held(folder):
            return {}
    return read_mapping(folder / "summary.json", problems)


def is_running(folder: Path) -> bool | None:
    """Return True if a process holds the run lock; None if unknown.

    A summary newer than the plan means that the run has ended: resuming writes the plan again.
    """
    summary, plan = last_change(folder / "summary.json"), last_change(folder / "plan.json")
    if summary is not None and (plan is None or summary >= plan):
        return False
    return is_held(folder)


def size_of(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0


def last_change(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):
        return None


def last_rows(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Return the intact rows in the last `limit` bytes of a JSON Lines file; none if it cannot be read."""
    try:
        file = open_plain(path)
    except UnreadableFile:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        return list(_rows_at(file, max(0, size - limit), limit))


def sample_rows(
    path: Path,
    *,
    most_bytes: int,
    steps: tuple[float, float] | None = None,
    num_blocks: int = 512,
    rows_per_block: int | None = None,
) -> list[dict[str, Any]]:
    """Return the intact rows of a metrics.jsonl, with `steps` those from one step to another. If they have more than
    `most_bytes`, read that much in blocks at even distances: steps in between are missing."""
    try:
        file = open_plain(path)
    except UnreadableFile:
        return []
    with file:
        first, last = 0, os.fstat(file.fileno()).st_size
        if steps is not None:
            first, last = _offset_of(file, steps[0], last), _offset_of(file, steps[1], last) + 2 * _PAGE_BYTES
        if last - first <= most_bytes:
            rows = list(_rows_at(file, first, last - first))
        else:
            block = most_bytes // num_blocks
            starts = (first + at * (last - first - block) // (num_blocks - 1) for at in range(num_blocks))
            rows = [row for start in starts for row in islice(_rows_at(file, start, block), rows_per_block)]
    low, high = steps or (-LARGEST, LARGEST)
    return [row for row in rows if (step := number(row.get("step"))) is not None and low <= step <= high]


def _offset_of(file: BinaryIO, step: float, size: int) -> int:
    """Return an offset close before the row of a step."""
    low, high = 0, size
    while high - low > _PAGE_BYTES:
        middle = (low + high) // 2
        row = next(_rows_at(file, middle, _PAGE_BYTES), {})
        if (number(row.get("step")) or 0.0) < step:
            low = middle
        else:
            high = middle
    return low


def _rows_at(file: BinaryIO, start: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield the intact rows that lie within a part of a JSON Lines file."""
    file.seek(start)
    lines = file.read(length).split(b"\n")
    for line in lines[1:] if start else lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            yield row
