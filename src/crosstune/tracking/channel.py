"""Start the process of a tracker, and send it messages without ever waiting for it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import child_environment

MOST_QUEUED_BYTES = 16 << 20
"""Values that wait for a tracker; about 50,000 steps."""
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from crosstune.tracking.process import main; main()"


class Channel:
    """A tracker's process, a queue of messages for it, and what it says."""

    def __init__(self, name: str, file: Path, *, variables: Mapping[str, str]) -> None:
        self.name = name
        self.replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ended = threading.Event()
        """Set when the tracker takes no more messages, for whatever reason."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._left_out = 0
        """The last step whose values found no room in the queue."""
        self._changed = threading.Condition()
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._child = _start(file, variables)
        except OSError as error:
            self._fail(f"its process cannot be started: {error.strerror or error}")
            return
        threading.Thread(target=self._write, name=f"tracker {name}", daemon=True).start()
        threading.Thread(target=self._read, name=f"tracker {name} replies", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message."""
        if not self.ended.is_set():
            with self._changed:
                self._append(message)

    def send_values(self, message: Mapping[str, Any]) -> None:
        """Queue the values of a step. They are left out while too much is waiting: once there is room again, the tracker
        is told to read them from the files of the run."""
        if self.ended.is_set():
            return
        with self._changed:
            if self._waiting_bytes > (MOST_QUEUED_BYTES // 2 if self._left_out else MOST_QUEUED_BYTES):
                self._left_out = max(self._left_out, message["step"])
                return
            self._recall_left_out()
            self._append(message)

    def send_end(self) -> None:
        """Queue the end, after whatever was left out."""
        if not self.ended.is_set():
            with self._changed:
                self._recall_left_out()
                self._append({"kind": "end"})

    def _recall_left_out(self) -> None:
        if self._left_out:
            self._append({"kind": "earlier", "until": self._left_out})
            self._left_out = 0

    def _append(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        self._changed.notify()

    def wait(self, seconds: float) -> bool:
        """Return whether the tracker has ended, after waiting for it."""
        return self.ended.wait(seconds)

    def kill(self) -> None:
        """End the process; what it started itself ends with it."""
        child = self._child
        if child is None or child.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if os.name == "nt":
                child.kill()
            else:
                os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def give_up(self, why: str) -> None:
        """Stop waiting for a tracker, and end it."""
        if not self.ended.is_set():
            self._fail(why)
        self.kill()

    def _fail(self, error: str) -> None:
        with self._changed:
            if self.ended.is_set():
                return
            self.ended.set()
            self._waiting.clear()
            self._waiting_bytes = 0
            self._changed.notify()
        self.replies.put({"kind": "failed", "error": error})

    def _write(self) -> None:
        assert self._child is not None and self._child.stdin is not None
        pipe = self._child.stdin
        while not self.ended.is_set():
            with self._changed:
                while not self._waiting and not self.ended.is_set():
                    self._changed.wait()
                lines = list(self._waiting)
                self._waiting.clear()
            try:
                for line in lines:
                    pipe.write(line)
                    with self._changed:
                        self._waiting_bytes -= len(line)
                pipe.flush()
            except OSError:  # the process is gone, which `_read` reports
                break
        with contextlib.suppress(OSError):
            pipe.close()

    def _read(self) -> None:
        child = self._child
        assert child is not None and child.stdout is not None
        for line in child.stdout:
            reply = json.loads(line)
            if reply["kind"] == "failed":
                self._fail(reply["error"])
            else:
                self.replies.put(reply)
            if reply["kind"] == "finished":
                with self._changed:
                    self.ended.set()
                    self._changed.notify()
        code = child.wait()
        how = f"by the signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        self._fail(f"its process ended {how}")


def _start(file: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    environment = child_environment({})
    return subprocess.Popen(
        [sys.executable, "-c", _START, json.dumps(sys.path), str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**variables, **environment},
        start_new_session=True,  # the Ctrl-C of a terminal is for the training
    )
