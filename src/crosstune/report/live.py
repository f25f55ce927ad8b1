"""Tell whether a process is running a run, and read the ends of the files that it is writing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from crosstune.core.json_files import parse_json
from crosstune.core.plain_files import UnreadableFile, open_plain
from crosstune.core.run_lock import is_held


def is_running(folder: Path) -> bool | None:
    """Return whether a process is at work on a run; None where that cannot be known.

    A summary that is newer than the plan is that of an ended run: resuming writes the plan again.
    """
    summary, plan = _changed(folder / "summary.json"), _changed(folder / "plan.json")
    if summary is not None and (plan is None or summary >= plan):
        return False
    return is_held(folder)


def last_rows(path: Path, *, limit: int) -> list[dict[str, Any]]:
    """Return the rows in the last `limit` bytes of a JSON Lines file. Damaged rows and a row that is being written are
    left out; a missing or unreadable file has none."""
    try:
        file = open_plain(path)
    except UnreadableFile:
        return []
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - limit))
        text = file.read(limit)
    lines = text.split(b"\n")
    rows = list[dict[str, Any]]()
    for line in lines[1:] if size > limit else lines:
        try:
            row = parse_json(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
