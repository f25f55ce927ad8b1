"""Write the run folder: the request, the plan, every step, every event, and the summary."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from crosstune.core.atomic_files import clear_leftovers, set_aside, write_text
from crosstune.core.errors import UserError
from crosstune.core.events import Event, StepMetrics
from crosstune.core.json_files import read_json, read_jsonl, to_json, write_json

if TYPE_CHECKING:
    from filelock import FileLock

LOCK = ".lock"
RUN_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "summary.json")


def _end_line(path: Path) -> None:
    """Remove a last line that a kill left incomplete."""
    if not path.exists():
        return
    written = path.read_bytes()
    if written and not written.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(written.rfind(b"\n") + 1)


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES)


def check_free(folder: Path, *, resuming: bool = False) -> None:
    """Raise a UserError when the folder holds a run already. With `resuming`, an unfinished run without a checkpoint is
    allowed: there is nothing to continue from, and it is moved aside."""
    if not holds_run(folder):
        return
    if not resuming:
        raise _taken(folder)
    if read_json(folder / "summary.json").get("status") == "finished":
        raise _without_checkpoint(folder)


def _without_checkpoint(folder: Path) -> UserError:
    return UserError(
        f"{folder} holds a finished run without a checkpoint.",
        why="it ended before it wrote one, so there is nothing to continue from.",
        do="pass --overwrite to move it aside and start over, or choose another --name",
    )


def _taken(folder: Path) -> UserError:
    return UserError(
        f"{folder} already holds a run.",
        why="a new run there would mix its records with the old one's.",
        do="choose another --name, pass --resume auto to continue it, or --overwrite to move it aside first",
    )


def _cannot_write(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"Cannot write the run folder {folder}.", why=str(error), do="choose another --output_dir"
    )


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `<name>~<n>` and return the new path; fail when it is in use."""
    lock = hold(folder)
    try:
        return set_aside(folder)
    except OSError as error:
        raise _cannot_write(folder, error) from error
    finally:
        lock.release()


def hold(folder: Path) -> FileLock:
    """Lock a run folder, so that only one process writes to it. The system releases the lock when the process ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{folder} is in use.",
            why="another process is training there.",
            do="wait for it or stop it, or choose another --name",
        ) from None
    except OSError as error:
        raise _cannot_write(folder, error) from error
    return lock


class RecordFailed(UserError):
    """The record of a run cannot be written: the disk is full, or gone."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"The record of the run could not be written: {path}.",
            why=f"{error.strerror or error}. The checkpoints are unchanged.",
            do="free space or repair the disk, then continue with --resume auto",
        )


class Record(Protocol):
    """Receives the steps, the events and the summary of a run."""

    folder: Path

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class SilentRecord:
    """The record of a rank that does not write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, metrics: StepMetrics) -> None:
        return None

    def on_event(self, event: Event) -> None:
        return None

    def finish(self, summary: Mapping[str, Any]) -> None:
        return None


class RunRecord:
    """Write a run folder. Each line is flushed, so a kill loses at most the line being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: TextIO | None = None
        self._events: TextIO | None = None
        self._lock: FileLock | None = None

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
            record._lock = hold(folder)
            with (folder / "config.yaml").open(
                "x", encoding="utf-8"
            ) as file:  # fails if another process created it first
                file.write(config_yaml)
            record._open_logs(plan)
        except FileExistsError:
            raise _taken(folder) from None
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return record

    @classmethod
    def reopen(cls, folder: Path, *, config_yaml: str, plan: Mapping[str, Any], step: int) -> RunRecord:
        """Continue the record of a run that resumes at `step`. Rows of later steps are removed from metrics.jsonl,
        since those steps are trained again; events are kept."""
        record = cls(folder)
        record._lock = hold(folder)
        try:
            clear_leftovers(folder, of=RUN_FILES.__contains__)
            rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row.get("step", 0) <= step]
            lines = "".join(to_json(row) + "\n" for row in rows)
            write_text(folder / "metrics.jsonl", lines)
            _end_line(folder / "events.jsonl")
            write_text(folder / "config.yaml", config_yaml)
            record._open_logs(plan)
        except OSError as error:
            raise _cannot_write(folder, error) from error
        return record

    def carry_on(self, metrics: Path, *, step: int) -> None:
        """Copy the rows of the run that this one continues, so that the loss curve is complete."""
        for row in read_jsonl(metrics):
            if row.get("step", 0) <= step:
                self._append(self._metrics, row)

    def _open_logs(self, plan: Mapping[str, Any]) -> None:
        write_json(self.folder / "plan.json", plan)
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = (self.folder / "events.jsonl").open("a", encoding="utf-8")

    def on_step(self, metrics: StepMetrics) -> None:
        self._append(self._metrics, metrics)

    def on_event(self, event: Event) -> None:
        self._append(self._events, {"time": time.time(), "kind": event.kind, **event.to_json()})

    def finish(self, summary: Mapping[str, Any]) -> None:
        path = self.folder / "summary.json"
        try:
            write_json(path, summary)
            for file in (self._metrics, self._events):
                if file is not None:
                    file.close()
        except OSError as error:
            raise RecordFailed(path, error) from error
        finally:
            self._metrics = self._events = None
            if self._lock is not None:
                self._lock.release()

    def _append(self, file: TextIO | None, data: Mapping[str, Any]) -> None:
        assert file is not None, "the record is closed"
        try:
            file.write(to_json(data) + "\n")
            file.flush()
        except OSError as error:
            raise RecordFailed(Path(file.name), error) from error
