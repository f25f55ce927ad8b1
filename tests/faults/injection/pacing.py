"""The environment in which a training pauses after each of its steps, hangs, or is killed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def paced(pause_s: float) -> dict[str, str]:
    """Return the variables for a training, in whatever process it ends up, that pauses so long after each step."""
    return disturbed(STEP_PAUSE_S=str(pause_s))


def hanging(runs: Sequence[str], *, step: int, folder: Path) -> dict[str, str]:
    """Return the variables with which these runs hang after a step once, until they are killed or lose their parent; then
    `folder/RUN` has the process id."""
    return disturbed(HANG_AT=f"{','.join(runs)}:{step}:{folder}")


def disturbed(**variables: str) -> dict[str, str]:
    hook = str(Path(__file__).parents[1] / "paced")
    path = os.pathsep.join(filter(None, [hook, os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, **variables}
