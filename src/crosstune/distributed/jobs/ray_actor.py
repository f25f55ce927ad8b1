"""Run a node's launcher inside a Ray actor. Ray imports this module by name on the node; it does not import ray."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence

from crosstune.config.load import child_environment
from crosstune.core.errors import UserError
from crosstune.distributed.jobs.attached import AttachedProcess
from crosstune.distributed.jobs.job import RANK_VARIABLES
from crosstune.distributed.master import free_ports

_MAX_LINES = 10_000
"""Lines kept until the driver reads them."""


class NodeActor:
    """One launcher, controlled by the driver of the job. It exits with this actor."""

    _launcher: AttachedProcess

    def free_port(self, address: str) -> int:
        """Return a free port of this node."""
        return free_ports(1, address=address)[0]

    def start(self, command: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        environment = child_environment(variables)
        for name in RANK_VARIABLES:
            environment.pop(name, None)
        python = command[0] or sys.executable
        words = [python, "-m", "crosstune.distributed.jobs.attached", python, *command[1:]]
        try:
            self._launcher = AttachedProcess(words, max_lines=_MAX_LINES, env=environment, cwd=folder)
        except OSError as error:
            raise UserError(
                f"Cannot start {python} in {folder} on {socket.gethostname()}.",
                why=str(error),
                do="start from a folder that all nodes share, and specify their Python with --python",
            ) from error

    def poll(self) -> tuple[int | None, list[str]]:
        """Return the exit code (None while it runs) and the lines since the last call."""
        code, waiting = self._launcher.poll(), self._launcher.lines
        return code, [waiting.popleft() for _ in range(len(waiting))]

    def send(self, name: str) -> None:
        """Send the launcher a signal by name."""
        self._launcher.send(name)
