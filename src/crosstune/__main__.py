"""`python -m crosstune` is `crosstune`. Ctrl-C ends it quietly from its first line on."""

import os
import signal
import sys
from typing import NoReturn

_AT_ONCE = 130
"""`core.errors.EXIT_AT_ONCE`, not imported yet."""
_SPINS = "1000"
"""OpenMP threads of torch and llama.cpp wait for each other in a loop of this length, then sleep. By default they spin for
milliseconds, which multiplies the time of every operation when other programs use the cores too."""


def start() -> int:
    """Run the command line of this process and return its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    if __name__ == "__main__" and sys.path[:1] == [os.getcwd()] and not __file__.startswith(sys.path[0]):  # noqa: PTH109
        del sys.path[0]  # by `python -m`: a folder `datasets` there is no library
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    from crosstune.cli.main import main

    return main()


def _stop(number: int, frame: object) -> NoReturn:
    """Exit immediately: nothing has been done, and an import may turn an exception into a different one."""
    os.write(2, b"\ncrosstune: stopped.\n")
    os._exit(_AT_ONCE)


if __name__ == "__main__":
    sys.exit(start())
