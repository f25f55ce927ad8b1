"""Start the process that renders chat templates, exchange requests with it, and end it when it exceeds a limit."""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

from crosstune.core.active_time import ActiveClock
from crosstune.core.errors import UserError
from crosstune.data.render_types import EXIT_OUT_OF_MEMORY, REPLY_HEADER, REQUEST_HEADER
from crosstune.data.template_limits import Limits

MOST_REPLY_BYTES = 1 << 30
_TICK_S = 0.05
"""Time between two looks at the CPU time and memory of the process."""
_SLACK_BYTES = 128 << 20
"""Memory of an interpreter with jinja, and what is not given back to the system."""
_SLACK_S = 2.0
_STOPPED_S = 10.0
"""After this time another process takes the place of one that somebody has stopped."""
# Nothing else of the environment is handed on: it may hold tokens and keys.
_KEPT_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")
_CODE = "import sys; sys.path += sys.argv[1:]; from crosstune.data.render_worker import main; main()"
_PACKAGES = ("crosstune", "jinja2", "markupsafe")


class Ended(Exception):
    """The process ended before it replied; `over_limit` if because of what the request made it do."""

    def __init__(self, why: str, *, over_limit: bool) -> None:
        super().__init__(why)
        self.why, self.over_limit = why, over_limit


class Stopped(Exception):
    """An exchange was given up by the thread that wanted its reply."""


class RenderProcess:
    """A running process, for one request at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._owner = os.getpid()
        self._child = _start()
        assert self._child.stdin is not None and self._child.stdout is not None
        self._stdin, self._stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._stdin, False)
        self._is_ready = False

    def exchange(self, body: bytes, *, cpu_s: float, stop: Event) -> bytes:
        """Send a request, which may take this much CPU time, and return the reply; raise Stopped once `stop` is set."""
        if not self._is_ready:
            self._await_start(stop)
        memory_bytes = self._limits.batch_memory_bytes(len(body))
        watch = _Watch(
            pid=self._child.pid, cpu_s=cpu_s, memory_bytes=memory_bytes, stalled_s=self._limits.stalled_s
        )
        return self._transfer(REQUEST_HEADER.pack(len(body), memory_bytes) + body, watch, stop)

    def close(self) -> None:
        """End the process and release its pipes. In a fork of its owner, the process goes on."""
        if os.getpid() == self._owner:
            self._child.kill()
            self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            if pipe is not None:
                pipe.close()

    def _await_start(self, stop: Event) -> None:
        assert self._child.stderr is not None
        watch = _Watch(
            pid=self._child.pid, cpu_s=60.0, memory_bytes=1 << 30, stalled_s=self._limits.stalled_s
        )
        try:
            self._transfer(b"", watch, stop)
        except Ended as error:
            lines = self._child.stderr.read(1 << 16).decode(errors="replace").strip().splitlines()
            self.close()
            raise _cannot_start(lines[-1] if lines else error.why) from error
        self._child.stderr.close()
        self._is_ready = True

    def _transfer(self, request: bytes, watch: _Watch, stop: Event) -> bytes:
        """Write the request and read the reply, each as far as the pipe takes or has it."""
        unsent = memoryview(request)
        received = bytearray()
        length = REPLY_HEADER.size
        pipes = select.poll()
        pipes.register(self._stdout, select.POLLIN)
        if unsent:
            pipes.register(self._stdin, select.POLLOUT)
        while len(received) < length:
            for pipe, _ in pipes.poll(_TICK_S * 1000):
                if pipe == self._stdin:
                    unsent = self._send(unsent)
                    if not unsent:
                        pipes.unregister(self._stdin)
                elif chunk := os.read(self._stdout, 1 << 20):
                    received += chunk
                else:
                    raise self._ended(watch)
            if length == REPLY_HEADER.size <= len(received):
                length += REPLY_HEADER.unpack_from(received)[0]
            if stop.is_set():
                self.close()
                raise Stopped
            self._check(watch, length)
        return bytes(received[REPLY_HEADER.size :])

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._stdin, unsent) :]
        except BrokenPipeError:
            return unsent[:0]  # it has ended, which reading its reply tells

    def _check(self, watch: _Watch, length: int) -> None:
        why = "it writes too much text" if length > MOST_REPLY_BYTES else watch.look()
        if why:
            self.close()
            raise Ended(why, over_limit=not watch.is_stopped)

    def _ended(self, watch: _Watch) -> Ended:
        status = self._child.wait()
        if self._is_ready:
            self.close()
        if status == -signal.SIGPROF:
            return Ended(watch.over_cpu, over_limit=True)
        if status == EXIT_OUT_OF_MEMORY:
            return Ended(watch.over_memory, over_limit=True)
        how = f"by the signal {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return Ended(f"the process that renders it was ended {how}", over_limit=False)


@dataclass
class _Watch:
    """The CPU time and memory of the process since a request. Time in which we are suspended ourselves does not count."""

    pid: int
    cpu_s: float
    memory_bytes: int
    stalled_s: float
    first_cpu_s: float | None = None
    last_cpu_s: float = -1.0
    is_stopped: bool = False
    clock: ActiveClock = field(default_factory=ActiveClock)

    def __post_init__(self) -> None:
        self.looked = self.moved = self.clock.now()

    @property
    def over_cpu(self) -> str:
        return f"it takes more than {self.cpu_s:.3g} s of CPU time"

    @property
    def over_memory(self) -> str:
        return f"it takes more than {self.memory_bytes >> 20:,} MiB of memory"

    def look(self) -> str:
        """Return the limit that is exceeded, or an empty string. Most requests end before the first look."""
        import psutil

        now = self.clock.now()
        if now - self.looked < _TICK_S:
            return ""
        self.looked = now
        try:
            process = psutil.Process(self.pid)
            times, memory_bytes = process.cpu_times(), process.memory_info().rss
            self.is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.Error:  # it has just ended
            return ""
        cpu_s = times.user + times.system
        if self.first_cpu_s is None:
            self.first_cpu_s = cpu_s
        if cpu_s != self.last_cpu_s:
            self.last_cpu_s, self.moved = cpu_s, now
        if cpu_s - self.first_cpu_s > self.cpu_s + _SLACK_S:
            return self.over_cpu
        # The system enforces this on Linux, but not on macOS.
        if memory_bytes > self.memory_bytes + _SLACK_BYTES:
            return self.over_memory
        if self.is_stopped and now - self.moved > _STOPPED_S:
            return f"the process that renders it has been stopped for {_STOPPED_S:g} s"
        if now - self.moved > self.stalled_s:
            return f"the process that renders it has been at rest for {self.stalled_s:g} s"
        return ""


def _start() -> subprocess.Popen[bytes]:
    paths = dict.fromkeys(str(_package_parent(name)) for name in _PACKAGES)
    try:
        return subprocess.Popen(
            # Isolated and without site packages: only the folders of the packages named here.
            [sys.executable, "-I", "-S", "-B", "-c", _CODE, *paths],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            start_new_session=True,  # the Ctrl-C of a terminal is for us
        )
    except OSError as error:
        raise _cannot_start(f"{error.strerror or error}") from error


def _package_parent(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, name
    return Path(found.origin).resolve().parents[1]


def _cannot_start(why: str) -> UserError:
    return UserError(
        "The process that renders chat templates cannot be started.",
        why=f"{why.rstrip('.')}.",
        do="raise the limits on memory, processes and open files (ulimit -a shows them)",
    )
