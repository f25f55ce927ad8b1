"""Read runs for the page: the list, one run, and what was added to its files since a byte offset."""

from __future__ import annotations

import contextlib
import os
import shlex
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from crosstune.core.errors import UserError
from crosstune.core.safe_text import printable
from crosstune.files.json_files import parse_json, to_json
from crosstune.files.paths import missing_run
from crosstune.files.plain_files import UnreadableFile, is_file_name, open_plain
from crosstune.files.run_record import BENCHMARKS, JUDGE_METRICS, RUN_FILES
from crosstune.report.charts import overlay_charts, run_charts
from crosstune.report.comparison import compare_loaded, render_comparison
from crosstune.report.files import RunFiles, is_running, last_rows, load_run, number, rewind, sample_rows
from crosstune.report.layout import chart_data
from crosstune.report.page import render
from crosstune.report.run_list import read_listed
from crosstune.report.trial_pages import LADDER_FILE, SWEEP_FILE, render_trials

T = TypeVar("T")
MOST_BYTES = 1 << 20
"""A larger metrics.jsonl is sampled; a closer look reads all of its steps again."""
NUM_BUCKETS = 400
"""A curve has at most three points for each."""
_GROUP_FILES = {SWEEP_FILE: "sweep", LADDER_FILE: "ladder"}
_UNDONE = (
    "<header><p>This {kind} has no result: it was stopped. The same command continues it.</p></header>",
    "<header><p>This {kind} is running. Its result appears here at its end, its trials below.</p></header>",
)
_SPARK_POINTS = 32
_MOST_NEW_BYTES = 1 << 20
_RECENT_STEPS = 20
_MOST_LARGE = 48
"""Runs, charts and pages in the cache."""
_LONGEST_NAME = 1000
_SHARE_OF_CORE, _LONGEST_STALE_S, _MAX_GROWTH = 0.01, 120.0, 1.25
_STATUS_S = 1.0
"""Minimum time between two checks of a run's lock, since a check acquires it for a moment."""
Stamps = tuple[tuple[int, int, int], ...]


class Runs:
    """The runs in a folder. A run is read again when its files have changed."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent.absolute()
        self._cache: dict[tuple[Any, ...], _Entry] = {}
        self._busy = (threading.RLock(), threading.RLock())  # the list does not wait for a large run

    def find(self, name: str) -> Path:
        """Return the folder of a run by its name, or its path below the runs folder."""
        parts = name.split("/")
        if len(name) > _LONGEST_NAME or not all(
            is_file_name(part) and not part.startswith(".") for part in parts
        ):
            raise UserError("This is not a valid name of a run.", do="open a run from the list")
        folder = self.parent.joinpath(*parts)
        if not _is_folder(folder):
            raise missing_run(folder)
        return folder

    def listing(self, group: str = "") -> dict[str, Any]:
        """Return the runs of a folder, newest first, and the folders that contain further runs."""
        folder = self.find(group) if group else self.parent
        runs, groups = [], []
        for path in sorted(_members(folder)):
            name = path.relative_to(self.parent).as_posix()
            if any(stamp[2] for stamp in _stamps(path)[: len(RUN_FILES)]):
                with contextlib.suppress(UserError):  # removed since
                    runs.append(self.row(name))
            elif kind := group_kind(path):
                groups.append({"name": name, "kind": kind, "runs": len(_members(path))})
        runs.sort(key=lambda row: -row["changed"])
        start = shlex.join(["crosstune", "train", "--max_steps", "40", "--output_dir", str(folder)])
        return {"folder": str(folder), "start": start, "runs": runs, "groups": groups}

    def warm_up(self) -> None:
        """Read the list before a page asks for it. Errors are shown when it asks."""
        with contextlib.suppress(UserError, OSError):
            self.listing()

    def row(self, name: str) -> dict[str, Any]:
        """Return the line of a run in the list, with its loss over time and the time left."""
        folder = self.find(name)
        return self._cached_while_training(("row", name), folder, lambda: _row(folder, name))

    def is_running(self, folder: Path) -> bool | None:
        moment = int(time.monotonic() / _STATUS_S)
        return self._cached(("lock", folder), moment, lambda: is_running(folder))

    def load(self, name: str) -> tuple[str, RunFiles]:
        """Return a run and the position it was read to."""
        folder = self.find(name)

        return self._cached_while_training(
            ("run", name), folder, lambda: (position_of(folder), load_run(folder, most_bytes=MOST_BYTES))
        )

    def page(self, name: str) -> str:
        """Return the report of a run without its curves, or the page of a ladder or a sweep."""
        folder = self.find(name)
        if kind := group_kind(folder):
            file = folder / (LADDER_FILE if kind == "ladder" else SWEEP_FILE)
            if not file.is_file():
                return _UNDONE[bool(self.is_running(folder))].format(kind=kind)
            return self._cached(("page", name), _stamp(file), lambda: _render_group(file, kind))
        place, run = self.load(name)
        return self._cached(("page", name), (place, id(run)), lambda: render(run, draws=False), of=[name])

    def charts(
        self, names: Sequence[str], *, smoothing: float, steps: tuple[float, float] | None = None
    ) -> str:
        """Return the charts of a run, or of several in one, as JSON; with `steps` the curves of these steps."""
        loaded = [self.load(name) for name in names]
        runs = [run for _, run in loaded]

        def make() -> str:
            near = [_closer(run, steps) for run in runs] if steps is not None else runs
            if len(near) == 1:
                found = run_charts(near[0], smoothing=smoothing)
            else:
                found = overlay_charts(near, _short_names(names), smoothing=smoothing)
            charts = [chart_data(chart, num_buckets=NUM_BUCKETS) for chart in found if chart.values]
            sampled = any(run.is_sampled for run in runs)
            return to_json({"position": loaded[0][0], "charts": charts, "sampled": sampled})

        return self._cached(("charts", tuple(names), smoothing, steps), tuple(map(id, runs)), make, of=names)

    def compare(self, names: Sequence[str]) -> str:
        """Return the page that compares runs, without its curves."""
        loaded = [self.load(name) for name in dict.fromkeys(names)]
        if len(loaded) < 2:
            raise UserError("A comparison needs two runs.", do="choose two or more in the list")
        return render_comparison(compare_loaded([run for _, run in loaded]), draws=False)

    def changes(self, name: str, after: str) -> Changes:
        """Return what was written to a run after a position."""
        folder = self.find(name)
        status = "running" if self.is_running(folder) else self.row(name)["status"]
        # All pages of a run are at the same position, so that what comes after it is read once.
        now = self._cached(("position", name), int(time.monotonic() / _STATUS_S), lambda: position_of(folder))
        make = partial(_changes, folder, after, now, status)
        return self._cached(("changes", name, after), (now, status), make)

    def _cached_while_training(self, name: tuple[str, str], folder: Path, make: Callable[[], T]) -> T:
        """Return the cached result of `make` for a run. While only rows and events are added, the result is made again only
        as often as a small share of a core allows, however many pages ask; new rows arrive through the stream."""
        stamps, running = _stamps(folder), self.is_running(folder)

        def is_fresh(found: _Entry) -> bool:
            if found.key[1] != running or not _same_part(found.key[0], stamps):
                return False
            age_s = time.monotonic() - found.made
            return age_s < min(_LONGEST_STALE_S, found.cost_s / _SHARE_OF_CORE)

        if (found := self._cache.get(name)) is not None and is_fresh(found):
            return cast(T, found.value)
        return self._cached(name, (stamps, running), make, is_fresh=is_fresh)

    def _cached(
        self,
        name: tuple[Any, ...],
        key: Any,
        make: Callable[[], T],
        *,
        of: Sequence[str] = (),
        is_fresh: Callable[[_Entry], bool] = lambda found: False,
    ) -> T:
        """Return what was made for this key, or make it, at the cost of the runs it is `of`. Pages that ask together wait for the
        first of them, and share what it made, although the run has grown in between."""
        asked = time.monotonic()
        with self._busy[name[0] in ("row", "lock", "position")]:
            found = self._cache.pop(name, None)
            if found is None or not (
                found.key == key or found.made - found.cost_s >= asked or is_fresh(found)
            ):
                began = time.monotonic()
                value = make()
                found = _Entry(key=key, value=value, made=time.monotonic(), cost_s=time.monotonic() - began)
                for each in of:
                    if (run := self._cache.get(("run", each))) is not None:
                        run.cost_s += found.cost_s
            self._cache[name] = found
            large = [each for each in list(self._cache) if each[0] in ("run", "charts", "page", "changes")]
            for old in large[:-_MOST_LARGE]:
                self._cache.pop(old, None)
        return cast(T, found.value)


@dataclass(kw_only=True)
class _Entry:
    key: Any
    value: Any
    made: float
    cost_s: float


def _same_part(old: Stamps, new: Stamps) -> bool:
    """Return True if only a few rows and events were added: no part of a run ended or began."""
    logs = [RUN_FILES.index(name) for name in ("metrics.jsonl", "events.jsonl")]
    others = [place for place in range(len(old)) if place not in logs]
    grew_little = all(old[at][0] == new[at][0] and new[at][2] <= _MAX_GROWTH * old[at][2] for at in logs)
    return grew_little and all(old[place] == new[place] for place in others)


class Changes(NamedTuple):
    """What was written to a run after a position."""

    position: str
    status: str
    text: str
    """All of it as JSON: the new rows, the kinds of the new events, and `reset` if the position is not of these files."""


def _changes(folder: Path, after: str, now: str, status: str) -> Changes:
    old = [int(part) for part in after.split("-") if part.isdecimal() and len(part) < 20]
    inode, size, events_size = map(int, now.split("-"))
    if len(old) == 3 and (old[1] > size or old[2] > events_size):  # the page was made after `now`
        inode, size, events_size = map(int, position_of(folder).split("-"))
    found: dict[str, Any] = {"rows": [], "events": [], "status": status}
    if len(old) != 3 or old[0] != inode or not 0 <= size - old[1] <= _MOST_NEW_BYTES or old[2] > events_size:
        found |= {"position": f"{inode}-{size}-{events_size}", "reset": True}
    else:
        found["rows"], size = _lines_between(folder / "metrics.jsonl", old[1], size)
        events, events_size = _lines_between(folder / "events.jsonl", old[2], events_size)
        found["events"] = [str(event.get("kind")) for event in events]
        found["position"] = f"{inode}-{size}-{events_size}"
    return Changes(found["position"], status, to_json(found))


def group_kind(folder: Path) -> str:
    """Return the kind of a folder that contains runs (a ladder or a sweep); empty for other folders."""
    found = next((kind for name, kind in _GROUP_FILES.items() if any(_stamp(folder / name))), "")
    return found or ("ladder" if _is_folder(folder / "trials") else "")


def _render_group(file: Path, kind: str) -> str:
    """Return the page of a ladder or a sweep, with the command that uses its result."""
    options = file.with_name("train.yaml" if kind == "ladder" else "best.yaml")
    command = f"crosstune train --config {shlex.quote(str(options))}" if options.is_file() else ""
    return render_trials(file, command=command)


def position_of(folder: Path) -> str:
    """Return the position after the last byte of a run: a resume replaces metrics.jsonl by another file."""
    metrics, events = (_stamp(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
    return f"{metrics[0]}-{metrics[2]}-{events[2]}"


def _row(folder: Path, name: str) -> dict[str, Any]:
    changed = max((stamp[1] for stamp in _stamps(folder)), default=0) / 1e9
    listed = read_listed(folder, changed=changed).to_json()
    recent = rewind(last_rows(folder / "metrics.jsonl", limit=1 << 14))[-_RECENT_STEPS:]
    seconds = [value for row in recent if (value := number(row.get("step_s"))) is not None]
    left = (listed["num_steps"] or 0) - listed["steps"]
    running = listed["status"] == "running"
    listed["eta_s"] = left * statistics.median(seconds) if running and left > 0 and seconds else None
    rows = sample_rows(
        folder / "metrics.jsonl", most_bytes=1 << 15, num_blocks=_SPARK_POINTS, rows_per_block=1
    )
    points = [value for row in rewind(rows) if (value := number(row.get("loss"))) is not None]
    listed["spark"] = points[:: max(1, len(points) // (2 * _SPARK_POINTS))]
    return listed | {"name": name, "folder": str(folder)}


def _closer(run: RunFiles, steps: tuple[float, float]) -> RunFiles:
    """Return the run with the rows of these steps only; of a sampled run, as many of them as a page can show."""
    rows: Sequence[Mapping[str, Any]]
    if run.is_sampled:
        rows = rewind(sample_rows(run.folder / "metrics.jsonl", most_bytes=MOST_BYTES, steps=steps))
    else:
        rows = [row for row in run.metrics if steps[0] <= row["step"] <= steps[1]]
    return replace(run, metrics=rows)


def _members(group: Path) -> list[Path]:
    """Return the folders in a folder; a ladder and a sweep have their runs one level below."""
    parent = group / "trials" if group_kind(group) else group
    try:
        names = [path.name for path in parent.iterdir()]
    except OSError:  # not made yet, or moved away
        return []
    shown = [name for name in names if name[0] != "." and is_file_name(name) and printable(name) == name]
    return [parent / name for name in shown if _is_folder(parent / name)]  # a browser cannot ask for others


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 (Path raises for some links)


def _stamps(folder: Path) -> Stamps:
    return tuple(_stamp(folder / name) for name in (*RUN_FILES, JUDGE_METRICS, BENCHMARKS))


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return 0, 0, 0
    return found.st_ino, found.st_mtime_ns, found.st_size


def _lines_between(path: Path, start: int, end: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the complete lines in a part of a file, and the offset after them."""
    try:
        with open_plain(path) as file:
            file.seek(start)
            text = file.read(min(end - start, _MOST_NEW_BYTES))
    except UnreadableFile:
        return [], start
    text = text[: text.rfind(b"\n") + 1]
    rows = []
    for line in text.split(b"\n"):
        try:
            row = parse_json(line)
        except ValueError:  # a damaged line: the others count
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows, start + len(text)


def _short_names(names: Sequence[str]) -> list[str]:
    last = [name.rpartition("/")[2] for name in names]
    return last if len({*last}) == len(last) else list(names)
