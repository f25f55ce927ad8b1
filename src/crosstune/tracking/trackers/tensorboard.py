"""TensorBoard: event files in the folder `tensorboard` of the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from crosstune.tracking.tracker import Place, Rows, TrackedRun, Values

PACKAGE = "tensorboard"
ENVIRONMENT: Mapping[str, str] = {}
FOLDER = "tensorboard"


class Tracker:
    """Write event files directly, to notice a full disk at once."""

    repeats = True

    def start(self, run: TrackedRun) -> Place:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = run.folder / FOLDER
        folder.mkdir(exist_ok=True)
        # Not the usual file name, since it contains the host name.
        path = folder / f"events.out.tfevents.{time.time_ns() // 1000:016d}.{os.getpid()}"
        self._file = path.open("wb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if run.continues:  # makes readers drop later steps in earlier files
            status = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=run.resumes_at + 1, session_log=status)
        self._write_text("config", _indented(run.config), step=run.resumes_at)
        return Place(where=str(folder), view=f"tensorboard --logdir {run.folder.parent}")

    def log(self, values: Values, *, step: int) -> None:
        from tensorboard.compat.proto import summary_pb2

        found = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=summary_pb2.Summary(value=found))

    def log_rows(self, name: str, rows: Rows, *, step: int) -> None:
        self._write_text(name, _markdown(rows), step=step)

    def finish(self, summary: Mapping[str, Any], *, succeeded: bool) -> None:
        if summary:
            self._write_text("summary", _indented(summary), step=int(summary.get("steps") or 0))
        self._file.close()

    def _write_text(self, tag: str, text: str, *, step: int) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2
        from tensorboard.plugins.text import metadata

        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        tensor = tensor_pb2.TensorProto(dtype="DT_STRING", string_val=[text.encode()], tensor_shape=shape)
        value = summary_pb2.Summary.Value(
            tag=tag,
            tensor=tensor,
            metadata=metadata.create_summary_metadata(display_name=tag, description=""),
        )
        self._write(step=step, summary=summary_pb2.Summary(value=[value]))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto import event_pb2

        self._records.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


def _indented(data: Mapping[str, Any]) -> str:
    return f"```json\n{json.dumps(data, indent=2, ensure_ascii=False)}\n```"


def _markdown(rows: Rows) -> str:
    """Return a Markdown table; escape line breaks, since they would end a row."""
    columns = list(rows[0]) if rows else []
    lines = [columns, ["---"] * len(columns), *([row.get(name, "") for name in columns] for row in rows)]
    return "\n".join("| " + " | ".join(_cell(item) for item in line) + " |" for line in lines)


def _cell(item: Any) -> str:
    text = str(item).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return "<br>".join(text.splitlines())
