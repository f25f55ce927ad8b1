"""Declare the shared options of `crosstune launch`, and read them. Each scheduler declares its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.safe_text import holds_secret

Check = Callable[[str], str | None]
"""Return a description of the allowed values; None if the value is allowed."""


@dataclass(frozen=True)
class JobOption:
    """An option of `crosstune launch`."""

    name: str
    metavar: str
    text: str
    type: type = str
    low: int = 1
    high: int = 2**20
    default: Any = None
    repeats: bool = False
    check: Check | None = None

    def read(self, raw: Any) -> Any:
        """Return the parsed value; raise a UserError for a wrong one."""
        if self.repeats:
            return tuple(self._read_one(item) for item in raw or ())
        return self.default if raw is None else self._read_one(raw)

    def _read_one(self, raw: str) -> Any:
        if self.type is int:
            text = raw.strip()
            good = text.isascii() and text.isdigit() and len(text) < 12 and self.low <= int(text) <= self.high
            wanted = None if good else f"an integer from {self.low} to {self.high}"
        elif self.type is Path:
            wanted = None if raw.strip() and raw.isprintable() else "a path"
        else:
            wanted = self.check(raw) if self.check else None
        if wanted is None and holds_secret(raw):
            wanted = "no password or access token: set it as an environment variable of the nodes instead"
        if wanted is not None:
            raise UserError(f"--{self.name} cannot be {shown(raw)}.", do=f"give {wanted}")
        return Path(raw).expanduser() if self.type is Path else self.type(raw)


def matches(pattern: str, wanted: str) -> Check:
    """Return a check that a value matches a regular expression as a whole."""
    compiled = re.compile(pattern)
    return lambda value: None if compiled.fullmatch(value) else wanted


NUM_NODES = JobOption("nnodes", "N", "number of nodes", type=int, high=2**16)
NUM_LOCAL = JobOption(
    "nproc_per_node",
    "M",
    "processes on each node, one per device (default: --gpus, or 1)",
    type=int,
    high=1024,
)
NUM_GPUS = JobOption(
    "gpus",
    "N",
    "GPUs to reserve on each node (default: --nproc_per_node; 0 with --backend cpu)",
    type=int,
    low=0,
    high=1024,
)
PYTHON = JobOption(
    "python",
    "FILE",
    "Python with crosstune on the nodes (default: the one that runs this command; in a container: python)",
    check=lambda value: None if value.strip() and value.isprintable() else "the path of a Python interpreter",
)
CPUS = JobOption("cpus", "N", "CPU cores to reserve on each node", type=int)
MEMORY = JobOption(
    "memory",
    "SIZE",
    "memory to reserve on each node, such as 64G",
    check=matches(r"[1-9][0-9]{0,9}[KMGT]", "a number with K, M, G or T, such as 64G"),
)
RESTARTS = JobOption(
    "restarts",
    "N",
    "restart all processes from the last checkpoint after a failure, up to N times (default: 3)",
    type=int,
    low=0,
    high=1000,
    default=3,
)
PORT = JobOption(
    "master_port",
    "PORT",
    "port on node 0 where the processes meet (default: 29500)",
    type=int,
    high=65535,
    default=29500,
)
BEFORE = JobOption(
    "before",
    "LINE",
    "shell line to run before training, such as `module load cuda` (may be repeated)",
    repeats=True,
    check=lambda value: None if value.strip() and "\n" not in value else "one line of shell",
)
COMMON = (NUM_NODES, NUM_LOCAL, NUM_GPUS, PYTHON)
"""Options of every scheduler."""
