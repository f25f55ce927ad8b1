"""Children forked from a warm process: torch is imported once, a trial then costs a fraction of a second."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 900.0
"""Against a hang; a trial takes seconds."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The end of a child: an exit code or the number of a signal, and the text that it printed."""

    code: int | None
    signal: int | None
    said: str

    def __str__(self) -> str:
        how = f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"
        return f"{how}, saying: {self.said[-1500:]}"


class Child:
    """A fork that calls a function, prints into a file and ends with the code that the function returns."""

    def __init__(self, function: Callable[[], int], *, said: Path) -> None:
        warm_up()
        said.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".said.", dir=said)
        self._said = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_child(function, handle)
        os.close(handle)

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def said(self) -> str:
        return self._said.read_text(encoding="utf-8", errors="replace")

    def wait(self, *, limit_s: float = LIMIT_S) -> Ended:
        end = time.monotonic() + limit_s
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                self.send(signal.SIGKILL)
                os.waitpid(self.pid, 0)
                said = self.said()
                self._said.unlink()
                return Ended(code=None, signal=None, said=f"{said}\nit hung and was ended")
            time.sleep(0.005)
        said = self.said()
        self._said.unlink()
        status = found[1]
        if os.WIFSIGNALED(status):
            return Ended(code=None, signal=os.WTERMSIG(status), said=said)
        return Ended(code=os.WEXITSTATUS(status), signal=None, said=said)

    def wait_until_stopped(self) -> None:
        """Wait until the child has stopped itself with SIGSTOP."""
        found = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED, self.said()

    def pause(self, seconds: float) -> None:
        """Let it run so long, or to its end."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.alive():
            time.sleep(0.002)

    def alive(self) -> bool:
        """Return whether it still runs; leave its end to `wait`."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def warm_up() -> None:
    """Import, and no more: what torch has started in a parent would not be there in a fork of it."""
    if "bitsandbytes" in sys.modules and "crosstune.torch_engine.session.session" in sys.modules:
        return
    import bitsandbytes  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import crosstune.cli.commands.train
    import crosstune.cli.main
    import crosstune.cli.terminal.screen
    import crosstune.recipes.sft
    import crosstune.report
    import crosstune.runs.pipeline
    import crosstune.torch_engine.session.session  # noqa: F401


def _be_child(function: Callable[[], int], handle: int) -> None:
    code = 70
    gc.freeze()  # garbage of the parent's tests, freed in a fork, would wait for threads that are not there, or crash
    try:
        import torch

        torch.set_num_threads(1)  # threads that the parent had are not in a fork
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        code = function()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 70
    except BaseException:  # noqa: BLE001  (a child has nobody to raise to)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
