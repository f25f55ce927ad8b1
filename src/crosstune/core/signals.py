"""The signals that stop a run after its current step, with a checkpoint."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

# SIGTERM: kill, schedulers. SIGHUP: a closed terminal or dropped connection. SIGUSR1: SLURM's `--signal=USR1@120` before a
# preemption or time limit. Windows has only the first two.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1")


def stop_signals() -> list[signal.Signals]:
    return [signal.Signals[name] for name in _NAMES if hasattr(signal, name)]


def taken_signals() -> list[signal.Signals]:
    """Return the stop signals that this process does not ignore: `nohup` ignores SIGHUP, a shell's `&` SIGINT and
    SIGQUIT."""
    return [number for number in stop_signals() if signal.getsignal(number) is not signal.SIG_IGN]


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle the stop signals inside the block; restore the former handlers at its end."""
    previous = {number: signal.signal(number, handler) for number in taken_signals()}
    try:
        yield
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
