"""Run a module or a file of Python in a child process with limits on time and memory: once, or kept alive between calls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def main_of(module: str, *words: str) -> list[str]:
    """Return the command that runs `main()` of a module in a child process with these arguments. It imports what this process
    would import, never a file of the working directory such as `types.py`."""
    start = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from {module} import main; main()"
    return [sys.executable, "-I", "-c", start, json.dumps(sys.path), *words]


def command_of(program: str | Path, *, memory_bytes: int, **limits: int) -> list[str]:
    """Return the command that runs a module, or a file that ends with .py, within limits. `limits`: names of the module
    `resource` without RLIMIT_, and their values."""
    values = {"AS": memory_bytes, "CORE": 0, **limits}
    named = {f"RLIMIT_{name}": (value, value + (name == "CPU")) for name, value in values.items()}
    return [sys.executable, "-I", "-c", _START, json.dumps([sys.path, named, str(program)])]


def end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads its own session, with the processes that it started, and collect it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses if it has ended
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
    and writes a line of JSON to its standard output. After a crash or a time-out, the next call starts it again."""

    def __init__(self, program: Path, *, memory_bytes: int, environment: Mapping[str, str]) -> None:
        self._command = command_of(program, memory_bytes=memory_bytes)
        self._environment = dict(environment)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def is_alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def call(self, request: Mapping[str, Any], *, wait_s: float) -> Any:
        """Return the reply to a request; raise ChildLost if there is none within `wait_s` seconds."""
        if not self.is_alive:
            self.close()
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
            self._child = subprocess.Popen(self._command, env=self._environment, **pipes)
        child, ended = self._child, threading.Event()
        assert child is not None and child.stdin is not None and child.stdout is not None

        def end() -> None:
            ended.set()
            end_group(child)

        timer = threading.Timer(wait_s, end)
        timer.start()
        reply = b""
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps({**request, "wait_s": wait_s}).encode() + b"\n")
                child.stdin.flush()
                reply = child.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # it may be ending the child
            if not reply:  # or a signal interrupted the wait: a late reply would belong to the next call
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(1)
                end_group(child)
                self.close()
        if reply:
            return json.loads(reply)
        if ended.is_set():
            raise ChildLost(f"it did not return within {wait_s:g} s")
        code = child.returncode
        ending = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        raise ChildLost(f"its process ended with {ending}")

    def close(self) -> None:
        """End the child and everything that it started."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None and child.stdout is not None
            if child.poll() is None:  # otherwise its number may be another process's by now
                end_group(child)
            with contextlib.suppress(OSError):  # unwritten bytes for a dead child
                child.stdin.close()
            child.stdout.close()
