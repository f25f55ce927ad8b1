"""Correct the predicted memory by the measurements of earlier runs on the same machine."""

from __future__ import annotations

import statistics
from typing import Any

from crosstune.config.plan import Plan
from crosstune.core.machine import Machine
from crosstune.core.memory import Correction
from crosstune.planner.remembered import recall_all, remember

FILE = "peak_memory"
MOST_RUNS = 20
"""The newest runs that count."""
LEAST_SHARE = 1.0
"""Runs whose tensors take less than this multiple of the framework's overhead are ignored."""
BOUNDS = (0.5, 2.0)
"""Limits of a correction; a larger deviation has another cause than the size of the step."""


def learn_peak(plan: Plan, measured_bytes: int) -> None:
    """Store the measured and the predicted peak of a finished run."""
    fitted = plan.fitted
    if fitted is None or measured_bytes <= 0:
        return
    overhead = fitted.parts.overhead
    if fitted.parts.total - overhead < LEAST_SHARE * overhead:
        return
    # The measured peak of a GPU does not include the framework's overhead.
    counted = fitted.parts.total - (0 if plan.backend.is_torch_cpu else overhead)
    step = fitted.step
    key: dict[str, Any] = {
        "machine": plan.machine.name,
        "backend": plan.backend.name,
        "parameters": fitted.shape.num_parameters,
        "method": step.method,
        "quantizer": step.quantizer,
        "batch": step.batch,
        "context": step.context,
        "checkpointing": step.checkpointing,
        "kernels": plan.config.kernels,
        "precision": plan.precision,
    }
    remember(FILE, key, {"predicted": counted, "measured": measured_bytes})


def read_corrections(machine: Machine) -> dict[str, Correction]:
    """Return backend -> the median ratio of measured to predicted peaks on a machine."""
    found: dict[str, list[tuple[float, float]]] = {}
    for entry in recall_all(FILE).values():
        key, value = entry["key"], entry["value"]
        predicted, measured = value.get("predicted", 0), value.get("measured", 0)
        if key.get("machine") == machine.name and predicted > 0 and measured > 0:
            found.setdefault(str(key.get("backend")), []).append((entry["time"], measured / predicted))
    corrections = {}
    for backend, ratios in found.items():
        newest = [ratio for _, ratio in sorted(ratios)[-MOST_RUNS:]]
        factor = min(max(statistics.median(newest), BOUNDS[0]), BOUNDS[1])
        corrections[backend] = Correction(factor=factor, num_runs=len(newest))
    return corrections
