"""Write the record of a run: the request, the plan, every step, every event, and the summary."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from crosstune.core.errors import UserError
from crosstune.core.events import Event, StepMetrics, Warned
from crosstune.core.safe_text import redact_values
from crosstune.files.atomic_files import clear_leftovers, set_aside, write_text
from crosstune.files.json_files import finite, read_json, read_jsonl, to_json, write_json
from crosstune.files.plain_files import (
    NO_ROOM,
    MissingFile,
    free_space,
    open_plain,
    readable_bytes,
    resume_advice,
)
from crosstune.files.run_lock import writing

JUDGE_METRICS, JUDGE_PREDICTIONS = "test_metrics.json", "test_predictions.json"
"""Files of a tested judge."""
BENCHMARKS = "benchmarks.json"
"""The results of `crosstune eval`."""
RUN_FILES = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "summary.json")
REFERENCE = "reference.safetensors"
"""The log probabilities of a preference run's reference, or of a distillation's teacher."""
_STAGED = (*RUN_FILES, REFERENCE)
REPORT = "report.html"
_KEPT_FOLDERS = ("checkpoints", "adapter", "model")


def has_record(folder: Path) -> bool:
    """Return True if a folder contains any file of a run's record."""
    return any((folder / name).exists() for name in RUN_FILES)


def is_run_folder(folder: Path) -> bool:
    """Return True if a folder contains a run. The next start replaces a record without steps."""
    return has_record(folder) and not _is_without_steps(folder)


def owning_run(path: Path) -> Path | None:
    """Return the run that a file belongs to: as its record, its page, or inside its checkpoints or result."""
    for parent in path.parents:
        name = path.relative_to(parent).parts[0]
        if name in (*RUN_FILES, REPORT, *_KEPT_FOLDERS) and "options" in read_log(parent / "plan.json"):
            return parent
    return None


def _is_without_steps(folder: Path) -> bool:
    """Return True if the record is one of ours and has no step, no checkpoint and no result."""
    if "options" not in read_log(folder / "plan.json"):
        return False  # these may be the user's own files, or a damaged run
    metrics = folder / "metrics.jsonl"
    if (metrics.is_file() and metrics.stat().st_size) or any(
        (folder / name).is_dir() for name in _KEPT_FOLDERS
    ):
        return False
    return read_log(folder / "summary.json").get("status") != "finished"


def read_log(path: Path) -> dict[str, Any]:
    """Return the contents of plan.json or summary.json; empty if missing or damaged, because a log must not stop a run."""
    try:
        return read_json(path)
    except UserError:
        return {}


def check_free(folder: Path, *, resuming: bool = False) -> None:
    """Raise a UserError when the folder already contains a run. With `resuming`, an unfinished run without a checkpoint is
    allowed, because it is moved aside."""
    if not is_run_folder(folder):
        return
    if not resuming:
        raise UserError(
            f"{folder} already contains a run.",
            why="a new run there would mix its records with the old records.",
            do="choose a different --name, pass --resume auto to continue it, or --overwrite to move it aside first",
        )
    if read_log(folder / "summary.json").get("status") == "finished":
        raise UserError(
            f"{folder} contains a finished run without a checkpoint.",
            why="it ended before it wrote one, so there is nothing to continue from.",
            do="pass --overwrite to move it aside and start over, or choose a different --name",
        )


def move_aside(folder: Path) -> Path:
    """Rename a run folder to the first free `<name>~<n>` and return the new path. The caller holds its lock."""
    with writing(folder):
        return set_aside(folder)


class RecordFailed(UserError):
    """The record of a run cannot be written: the disk is full or was lost."""

    def __init__(self, path: Path, error: OSError) -> None:
        room = ""
        if error.errno in NO_ROOM:
            free = readable_bytes(free_space(path.parent))
            room = f": {free} are free, and the records of a run need a few MB"
        super().__init__(
            f"The record of the run could not be written: {path}.",
            why=f"{error.strerror or error}{room}. The checkpoints are unchanged.",
            do=resume_advice(error),
        )


@contextlib.contextmanager
def _recording(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordFailed(path, error) from error


class RecordFailedElsewhere(RecordFailed):
    """Raised in a process that does not write the record."""

    def __init__(self, message: str, *, why: str, do: str) -> None:
        UserError.__init__(self, message, why=why, do=do)


class Record:
    """The record of a rank that writes nothing; `RunRecord` writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        """Replace plan.json after opening the model changed the plan."""

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class RunRecord(Record):
    """Write a run folder, whose lock the caller holds. Each line is flushed, so a crash loses at most the line being
    written. Resuming leaves the metrics and the summary unchanged until the first step."""

    def __init__(self, folder: Path, *, resumes_at: int | None = None) -> None:
        super().__init__(folder)
        self._metrics: TextIO | None = None
        self._events: TextIO | None = None
        self._resumes_at = resumes_at
        self._carried: Path | None = None
        self._finished = False

    @classmethod
    def create(cls, folder: Path, *, config_yaml: str, plan: Mapping[str, Any]) -> RunRecord:
        if folder.exists() and not folder.is_dir():
            raise UserError(
                f"{folder} is a file, not a folder for a run.", do="choose a different --output_dir or --name"
            )
        check_free(folder)
        record = cls(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name in RUN_FILES:  # from a start without a step
                (folder / name).unlink(missing_ok=True)
            clear_leftovers(folder, of=_STAGED.__contains__)
            try:
                record._open_logs(config_yaml, plan)
            except OSError:
                record._remove_start()
                raise
        return record

    @classmethod
    def reopen(cls, folder: Path, *, config_yaml: str, plan: Mapping[str, Any], step: int) -> RunRecord:
        """Continue the record of a run that resumes at `step`."""
        record = cls(folder, resumes_at=step)
        with writing(folder):
            clear_leftovers(folder, of=_STAGED.__contains__)
            _end_line(folder / "events.jsonl")
            record._open_logs(config_yaml, plan)
        return record

    def prepend_metrics(self, metrics: Path, *, step: int) -> None:
        """Start with the rows of the run that this one continues, to complete the loss curve."""
        self._carried, self._resumes_at = metrics, step

    def _open_logs(self, config_yaml: str, plan: Mapping[str, Any]) -> None:
        write_json(self.folder / "plan.json", redact_values(finite(plan)))
        write_text(self.folder / "config.yaml", config_yaml)
        self._events = (self.folder / "events.jsonl").open("a", encoding="utf-8")
        (self.folder / "metrics.jsonl").touch()

    def _remove_start(self) -> None:
        """Remove the files that a start wrote before the disk was full, and the folder if it is then empty."""
        if self._events is not None:
            self._events.close()
        with contextlib.suppress(OSError):
            for name in RUN_FILES:
                (self.folder / name).unlink(missing_ok=True)
            self.folder.rmdir()

    def _open_metrics(self) -> TextIO:
        """Open metrics.jsonl for the first step, without rows of steps that are repeated."""
        path = self.folder / "metrics.jsonl"
        if self._resumes_at is not None:
            rows = self._rows_until(self._resumes_at)
            write_text(path, "".join(to_json(row) + "\n" for row in rows))
        return path.open("a", encoding="utf-8")

    def _rows_until(self, last: int) -> list[dict[str, Any]]:
        """Return the rows up to a step. A damaged file is set aside, because a log must not stop a run."""
        path = self._carried or self.folder / "metrics.jsonl"
        try:
            rows = read_jsonl(path)
        except UserError as error:
            kept = path if self._carried is not None else set_aside(path)
            self.on_event(
                Warned(message=f"the earlier rows are not shown: {error.message} It is kept as {kept}")
            )
            return []
        return [row for row in rows if isinstance(row.get("step"), int) and row["step"] <= last]

    def on_step(self, metrics: StepMetrics) -> None:
        if self._metrics is None:
            with _recording(self.folder / "metrics.jsonl"):
                self._metrics = self._open_metrics()
        self._append(self._metrics, metrics)

    def on_event(self, event: Event) -> None:
        row = redact_values(finite({"time": time.time(), "kind": event.kind, **event.to_json()}))
        if not self._finished:
            self._append(self._events, row)
            return
        path = self.folder / "events.jsonl"
        with _recording(path), path.open("a", encoding="utf-8") as file:
            self._append(file, row)

    def on_plan(self, plan: Mapping[str, Any]) -> None:
        path = self.folder / "plan.json"
        with _recording(path):
            write_json(path, redact_values(finite(plan)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        path = self.folder / "summary.json"
        try:
            with _recording(path):
                if self._metrics is None and summary.get("status") == "finished":
                    self._metrics = self._open_metrics()
                began = self._metrics is not None or self._resumes_at is None or self._carried is not None
                if began or not path.exists():
                    write_json(path, redact_values(finite(summary)))
                for file in filter(None, (self._metrics, self._events)):
                    file.close()
        finally:
            self._metrics = self._events = None
            self._finished = True  # later events of trackers are appended

    def _append(self, file: TextIO | None, data: Mapping[str, Any]) -> None:
        assert file is not None, "the record is closed"
        with _recording(Path(file.name)):
            file.write(to_json(data) + "\n")
            file.flush()


def _end_line(path: Path) -> None:
    """Remove a last line that a crash left incomplete."""
    try:
        with open_plain(path) as file:
            written = file.read()
    except MissingFile:
        return
    if written and not written.endswith(b"\n"):
        with path.open("r+b") as opened:
            opened.truncate(written.rfind(b"\n") + 1)
