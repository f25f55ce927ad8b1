"""Make the rows that a run records of its steps and samples."""

from __future__ import annotations

from typing import Any, cast

from crosstune.core.events import SampleRow, StepMetrics
from crosstune.core.protocols import Backward, Sample


def sample_row(sample: Sample) -> SampleRow:
    """Return a sample as events.jsonl has it."""
    row = SampleRow(prompt=sample.prompt, answer=sample.answer, reference=sample.reference)
    if sample.frames:
        row["frames"] = list(sample.frames)
    return row


def step_row(
    step: int,
    result: Backward | None,
    *,
    weight_name: str,
    lr: float,
    step_s: float,
    cpu_s: float,
    used_bytes: int,
) -> StepMetrics:
    """Return the row of metrics.jsonl for a step; `result` is None for a skipped one."""
    row: dict[str, Any] = {
        "step": step + 1,
        "loss": result.loss if result else None,
        "tokens": result.num_tokens if result else 0,
        weight_name: result.weight if result else 0,
        "lr": lr,
        "grad_norm": result.grad_norm if result else None,
        "step_s": step_s,
        "cpu_s": cpu_s,
        "tokens_per_s": result.num_tokens / step_s if result else 0.0,
        "memory_bytes": used_bytes,
        **(result.metrics if result else {}),
    }
    if result is None:
        row["skipped"] = True
    return cast(StepMetrics, row)  # plus the recipe's weight and the task's metrics
