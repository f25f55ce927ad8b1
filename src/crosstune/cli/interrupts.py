"""End quietly on Ctrl-C, however often it is pressed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

from crosstune.core.errors import EXIT_AT_ONCE


def end_quietly(run: Callable[[], int], *, is_process: bool) -> int:
    """Return the exit code of `run`, or that of a Ctrl-C; ignore each one that follows.

    With `is_process` they stay ignored until the process has ended, as Python prints a traceback for one that arrives
    while it shuts down.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        try:
            return run()
        except KeyboardInterrupt:
            return _stop()
    except KeyboardInterrupt:  # it was pressed again before the next ones were ignored
        return _stop()
    except Exception as error:
        if not _comes_from_ctrl_c(error):
            raise
        return _stop()
    finally:
        if not is_process:
            _handle(before)


def _comes_from_ctrl_c(error: BaseException) -> bool:
    """Return whether a Ctrl-C came out of an import as another error, as from libraries with native parts."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return any(isinstance(link, KeyboardInterrupt) for link in chain)


def _stop() -> int:
    _handle(signal.SIG_IGN)
    print("\ncrosstune: stopped.", file=sys.stderr)
    return EXIT_AT_ONCE


def _handle(handler: object) -> None:
    # Python sets handlers in the main thread only, and one that was not set in Python is None.
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
