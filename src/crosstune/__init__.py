"""Train language models on any machine, and move the run to another."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crosstune.core import __version__

if TYPE_CHECKING:
    from crosstune.api.callbacks import STOP, Callback, StopTraining
    from crosstune.api.model import Model, load
    from crosstune.api.train import PlanReport, Run, plan, train
    from crosstune.core.errors import UserError

__all__ = [
    "train",
    "plan",
    "load",
    "Run",
    "PlanReport",
    "Model",
    "Callback",
    "STOP",
    "StopTraining",
    "UserError",
    "__version__",
]

# Public name -> its module, imported on first use to keep `import crosstune` light.
_HOMES = {
    "train": "crosstune.api.train",
    "plan": "crosstune.api.train",
    "load": "crosstune.api.model",
    "Run": "crosstune.api.train",
    "PlanReport": "crosstune.api.train",
    "Model": "crosstune.api.model",
    "Callback": "crosstune.api.callbacks",
    "STOP": "crosstune.api.callbacks",
    "StopTraining": "crosstune.api.callbacks",
    "UserError": "crosstune.core.errors",
}


if not TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module 'crosstune' has no attribute {name!r}")
        return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
