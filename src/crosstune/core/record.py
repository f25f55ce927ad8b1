"""The run directory: what was asked, what ran, every step, every event, how it ended."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from crosstune.core.errors import UserError

RUN_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "summary.json")


def write_json(path: Path, data: Any) -> None:
    """Write beside, flush to disk, rename: a reader sees the old file or the new one, never half of one."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    with staged.open("w", encoding="utf-8") as file:
        json.dump(finite(data), file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def finite(value: Any) -> Any:
    """The same value with NaN and infinities as null, which is all that JSON can say of them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Lines of a record. A last line cut short by a kill is left out; any other bad line is an error."""
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise UserError(f"{path}, line {number} is not JSON.", why=str(error)) from error
    return rows


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def check_free(folder: Path) -> None:
    if holds_run(folder):
        raise _taken(folder)


def _taken(folder: Path) -> UserError:
    return UserError(
        f"{folder} already holds a run.",
        why="a new run there would mix its records with the old one's.",
        do="choose another --name, or pass --overwrite to move the old run aside first",
    )


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `<name>~<n>` and return the new path."""
    number = 1
    while (target := folder.with_name(f"{folder.name}~{number}")).exists():
        number += 1
    folder.rename(target)
    return target


class RunRecord:
    """Writes one run directory. Lines are flushed as they come, so a kill loses at most the line being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: TextIO | None = None
        self._events: TextIO | None = None

    @classmethod
    def create(cls, folder: Path, *, config_yaml: str, plan: Mapping[str, Any]) -> RunRecord:
        if folder.exists() and not folder.is_dir():
            raise UserError(
                f"{folder} is a file, not a folder for a run.", do="choose another --output_dir or --name"
            )
        check_free(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            record = cls(folder)
            with (folder / "config.yaml").open(
                "x", encoding="utf-8"
            ) as file:  # whoever creates it has the folder
                file.write(config_yaml)
            write_json(folder / "plan.json", plan)
            record._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
            record._events = (folder / "events.jsonl").open("a", encoding="utf-8")
        except FileExistsError:
            raise _taken(folder) from None
        except OSError as error:
            raise UserError(
                f"Cannot write the run folder {folder}.", why=str(error), do="choose another --output_dir"
            ) from error
        return record

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self._append(self._metrics, metrics)

    def on_event(self, kind: str, data: Mapping[str, Any]) -> None:
        assert "kind" not in data and "time" not in data, f"an event of kind {kind} brings its own"
        self._append(self._events, {"time": time.time(), "kind": kind, **data})

    def finish(self, summary: Mapping[str, Any]) -> None:
        write_json(self.folder / "summary.json", summary)
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()
        self._metrics = self._events = None

    def _append(self, file: TextIO | None, data: Mapping[str, Any]) -> None:
        assert file is not None, "the record is closed"
        file.write(json.dumps(finite(data), ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()
