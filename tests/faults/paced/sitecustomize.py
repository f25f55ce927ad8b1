"""Pause after each step of a training, so that a test on a busy machine can interrupt it before it ends.

Python imports this module at its start where the folder is on PYTHONPATH; `STEP_PAUSE_S` has the seconds.
"""

import os
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


if "STEP_PAUSE_S" in os.environ:
    threading.Thread(target=_pause_steps, daemon=True).start()
