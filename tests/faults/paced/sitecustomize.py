"""Disturb a training: pause after each step, hang after one, or kill it at its start.

Python imports this module at its start where the folder is on PYTHONPATH. `STEP_PAUSE_S` has the seconds of the pause. With
`HANG_AT=RUN,...:STEP:FOLDER` each of these runs hangs after the step, the first time: it writes its process id to FOLDER/RUN, and
goes on when its parent is gone. `KILLED_AT_START` kills every `crosstune train`.
"""

import os
import pathlib
import signal
import sys
import threading
import time


def _pause_steps() -> None:
    record = None
    while record is None:  # only a training imports it
        time.sleep(0.05)
        record = getattr(sys.modules.get("crosstune.files.run_record"), "RunRecord", None)
    plain, pause_s = record.on_step, float(os.environ["STEP_PAUSE_S"])

    def on_step(self, metrics):  # type: ignore[no-untyped-def]
        plain(self, metrics)
        time.sleep(pause_s)

    record.on_step = on_step


def _hang_at(runs: list[str], step: int, folder: str) -> None:
    from crosstune.files.run_record import RunRecord

    plain = RunRecord.on_step

    def on_step(self, metrics):  # type: ignore[no-untyped-def]
        plain(self, metrics)
        seen = pathlib.Path(folder, self.folder.name)
        if self.folder.name in runs and metrics["step"] == step and not seen.exists():
            parent, new = os.getppid(), seen.with_suffix(".new")
            new.write_text(str(os.getpid()))
            new.rename(seen)
            while os.getppid() == parent:
                time.sleep(0.02)

    RunRecord.on_step = on_step  # type: ignore[method-assign]


if "STEP_PAUSE_S" in os.environ:
    threading.Thread(target=_pause_steps, daemon=True).start()
if "HANG_AT" in os.environ:
    _runs, _step, _folder = os.environ["HANG_AT"].split(":", 2)
    _hang_at(_runs.split(","), int(_step), _folder)
if "KILLED_AT_START" in os.environ and "train" in sys.orig_argv:
    os.kill(os.getpid(), signal.SIGKILL)
