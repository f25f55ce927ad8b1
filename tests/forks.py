"""Run a function in a fork of the pytest process, which has imported all that it needs."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

LIMIT_S = 900.0


@dataclass
class Forked:
    """A fork that runs, or ran."""

    process: BaseProcess
    said: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and the output."""
        self.process.join(LIMIT_S)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode is not None
        return self.process.exitcode, self.said.read_text()


def fork(function: Callable[[], int], *, said: Path) -> Forked:
    """Start a function that returns its exit code and prints into a file."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(function, said))
    process.start()
    return Forked(process, said)


def _run(function: Callable[[], int], said: Path) -> None:
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for number in (1, 2):
        os.dup2(handle, number)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    sys.exit(function())
