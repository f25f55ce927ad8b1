"""Run a module or a file of Python in a child process with limits on time and memory: once, or kept alive between calls."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from crosstune.core.errors import UserError

_WAIT_PER_CPU_SECOND = 10.0
"""Seconds of wall time allowed per second of CPU time, since the machine may be busy."""
# The limits are set before anything is imported. Windows has none; there, only the parent's timeout applies.
_START = """
import json, runpy, sys
sys.path[:], limits, program = json.loads(sys.argv[1])
try:
    import resource
except ImportError:
    pass
else:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), value)
(runpy.run_path if program.endswith(".py") else runpy.run_module)(program, run_name="__main__")
"""
_OUTPUT_S = 1.0
"""Longest wait for the text of a call whose reply is there."""
_KEPT_OUTPUT = 1 << 16
"""Bytes of a call's output that are kept."""


def command_of(program: str | Path, *, memory_bytes: int, **limits: int) -> list[str]:
    """Return the command that runs a module, or a file that ends with .py, within limits. `limits`: names of the module
    `resource` without RLIMIT_, and their values."""
    values = {"AS": memory_bytes, "CORE": 0, **limits}
    named = {f"RLIMIT_{name}": (value, value + (name == "CPU")) for name, value in values.items()}
    return [sys.executable, "-I", "-c", _START, json.dumps([sys.path, named, str(program)])]


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads its own session, with the processes that it started, and collect it."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # macOS refuses for a process that has ended
        os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
    child.wait()


class OverLimit(UserError):
    """The child exceeded its limit of time or memory, or failed."""


def run_limited(
    module: str, data: bytes, *, what: str, do: str, cpu_seconds: int, memory_bytes: int
) -> bytes:
    """Run `module` as the main program with `data` as its standard input; return its standard output. Raise OverLimit with
    the message `what` and the advice `do` when it exceeds a limit or fails."""
    try:
        child = subprocess.run(
            command_of(module, memory_bytes=memory_bytes, CPU=cpu_seconds),
            input=data,
            capture_output=True,
            timeout=cpu_seconds * _WAIT_PER_CPU_SECOND,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OverLimit(
            what, why=f"it does not finish within {cpu_seconds} seconds of CPU time.", do=do
        ) from error
    if child.returncode:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        limit = (
            f"it needs more than {cpu_seconds} seconds of CPU time or {memory_bytes >> 20:,} MiB of memory."
        )
        raise OverLimit(what, why=lines[-1][:300] if lines and child.returncode > 0 else limit, do=do)
    return child.stdout


class ChildLost(Exception):
    """The child of a Worker ended or did not answer in time; the text says why."""


class Worker:
    """A file of Python in a child process that is kept alive. For each call it reads a line of JSON from its standard input,
    writes a zero byte to its standard error after the text of the call, and a line of JSON to its standard output. After a
    death or a time-out, the next call starts it again."""

    def __init__(self, program: Path, *, memory_bytes: int, environment: Mapping[str, str]) -> None:
        self._command = command_of(program, memory_bytes=memory_bytes)
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._printed, self._is_whole = bytearray(), threading.Event()

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def call(self, request: Any, *, wait_s: float) -> Any:
        """Return the reply to a request; raise ChildLost if there is none within `wait_s` seconds."""
        if not self.is_alive:
            self._start()
        child = self._child
        assert child is not None and child.stdin is not None
        self._is_whole.clear()
        try:
            child.stdin.write(json.dumps(request).encode() + b"\n")
            child.stdin.flush()
            reply = self._replies.get(timeout=wait_s)
        except queue.Empty:
            self.close()
            raise ChildLost(f"it did not return within {wait_s:g} s") from None
        except BrokenPipeError:
            reply = b""
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5)
            code = child.returncode
            self.close()
            ending = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
            raise ChildLost(f"its process ended with {ending}")
        self._is_whole.wait(_OUTPUT_S)
        return json.loads(reply)

    def printed(self) -> str:
        """Return the text that was written since the last time, at most the first 64 KiB."""
        text, self._printed = bytes(self._printed), bytearray()
        return text.decode(errors="replace")

    def close(self) -> None:
        """End the child and everything that it started."""
        if self._child is not None:
            end_group(self._child)
            assert self._child.stdin is not None
            with contextlib.suppress(OSError):  # unwritten bytes for a dead child
                self._child.stdin.close()
            self._child = None

    def _start(self) -> None:
        self.close()
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            self._command, stdin=pipe, stdout=pipe, stderr=pipe, env=self._environment, start_new_session=True
        )
        self._replies = queue.SimpleQueue()
        assert self._child.stdout is not None and self._child.stderr is not None
        for read, stream in (
            (self._read_replies, self._child.stdout),
            (self._read_output, self._child.stderr),
        ):
            threading.Thread(target=read, args=(stream, self._replies), daemon=True).start()

    def _read_replies(self, stream: IO[bytes], replies: queue.SimpleQueue[bytes]) -> None:
        with stream:
            for line in stream:
                replies.put(line)
        replies.put(b"")

    def _read_output(self, stream: IO[bytes], replies: queue.SimpleQueue[bytes]) -> None:
        with stream:
            while part := os.read(stream.fileno(), 1 << 16):
                self._printed += part.replace(b"\0", b"")[: max(0, _KEPT_OUTPUT - len(self._printed))]
                if part.endswith(b"\0"):
                    self._is_whole.set()
