"""Run a machine's launcher inside a Ray actor. It must not import ray: Ray runs it by its name."""

from __future__ import annotations

import collections
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from crosstune.config.load import child_environment
from crosstune.core.errors import UserError
from crosstune.distributed.jobs.job import RANK_VARIABLES

_MOST_LINES = 10_000
"""Lines that are kept until the driver takes them."""


class NodeActor:
    """One launcher, started, watched and signalled by the driver."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)

    def free_port(self, address: str) -> int:
        """Return a port of this machine that nobody listens on."""
        with socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM
        ) as found:
            found.bind((address, 0))
            return int(found.getsockname()[1])

    def start(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Start the launcher, which ends when this actor does, however that happens."""
        environment = child_environment(variables)
        for name in RANK_VARIABLES:
            environment.pop(name, None)
        python = command[0] or sys.executable
        command = [python, *command[1:]]
        try:
            self._process = subprocess.Popen(
                [python, "-m", "crosstune.distributed.jobs.attached", *command],
                env=environment,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except OSError as error:
            raise UserError(
                f"Cannot start {python} in {folder} on {socket.gethostname()}.",
                why=str(error),
                do="start from a folder that all machines share, and name their Python with --python",
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def poll(self) -> tuple[int | None, list[str]]:
        """Return the exit code, or None while it runs, and the lines since the last call."""
        assert self._process is not None and self._reader is not None
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=5.0)
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        return code if code is None or code >= 0 else 128 - code, lines

    def send(self, name: str) -> None:
        """Send the launcher the signal of this name."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended meanwhile, which poll will tell
            self._process.stdin.write(f"{name}\n".encode())
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        for line in self._process.stdout or ():
            self._lines.append(line.decode(errors="replace").rstrip("\n"))
