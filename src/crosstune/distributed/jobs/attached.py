"""Run a command for a program on another machine: pass on the signals it names, and stop when it is gone.

`python -m crosstune.distributed.jobs.attached COMMAND...` reads names of signals from standard input, one per line. The
end of the input means that the program, or the connection to it, is gone.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from crosstune.core.signals import stop_signals

GRACE_S = 60.0
"""Time to save a checkpoint after SIGTERM, before SIGKILL."""


def main(command: Sequence[str]) -> int:
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
