"""Run a command for a program on another node: forward the signals it requests, and stop when it exits.

`python -m crosstune.distributed.jobs.attached COMMAND...` reads signal names from standard input, one per line, until
the program exits or the connection breaks. `AttachedProcess` is the program's side.
"""

from __future__ import annotations

import collections
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from crosstune.process.this_process import stop_signals

GRACE_S = 60.0
"""Time to save a checkpoint after SIGTERM, before SIGKILL."""


class AttachedProcess:
    """A process that runs `main`, on this node or over ssh. Its output is kept in `lines` unless `shown`."""

    def __init__(
        self, command: Sequence[str], *, shown: bool = False, max_lines: int, **options: Any
    ) -> None:
        self.lines: collections.deque[str] = collections.deque(maxlen=max_lines)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=None if shown else subprocess.PIPE,
            stderr=None if shown else subprocess.STDOUT,
            **options,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """Return the exit code once all output is read; None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=5.0)
        return code if code is None or code >= 0 else 128 - code

    def send(self, name: str) -> None:
        """Send the signal of this name."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended meanwhile
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()

    def close(self) -> None:
        """Kill it; the input of its command ends, so the command stops."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.lines.append(line.decode(errors="replace").rstrip())


def main(command: Sequence[str]) -> int:
    """Run the command with forwarded signals; return its exit code as a shell would."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def pass_on(number: int, frame: FrameType | None = None) -> None:
        child.send_signal(number)

    for number in stop_signals():
        signal.signal(number, pass_on)
    ended = threading.Event()
    threading.Thread(target=_follow_input, args=(child, ended), daemon=True).start()
    code = child.wait()
    ended.set()
    return code if code >= 0 else 128 - code


def _follow_input(child: subprocess.Popen[bytes], ended: threading.Event) -> None:
    for line in sys.stdin:
        if (name := line.strip()) in {number.name for number in stop_signals()}:
            child.send_signal(signal.Signals[name])
    child.send_signal(signal.SIGTERM)
    if not ended.wait(GRACE_S):
        child.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
