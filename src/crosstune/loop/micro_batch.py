"""Make micro-batches smaller after an out-of-memory error, with the same rows in each step."""

from __future__ import annotations

from dataclasses import replace

from crosstune.config.schema import Config
from crosstune.core.events import Recovered
from crosstune.core.out_of_memory import EVALUATING, GENERATING, STEP, OutOfMemory
from crosstune.data.row_order import rows_per_step


def halve(config: Config, *, doing: str) -> Config | None:
    """Return the configuration with half the rows at a time in what did not fit; None when nothing can be halved."""
    if doing == STEP:
        return _halve_step(config)
    return _halve_evaluation(config) if doing in (EVALUATING, GENERATING) else None


def _halve_step(config: Config) -> Config | None:
    """Keep the rows of a step. The last micro-batch of a step may be shorter than the others."""
    if config.batch_size == 1:
        return None
    rows, size = rows_per_step(config), config.batch_size // 2
    return replace(
        config,
        batch_size=size,
        gradient_accumulation_steps=-(-rows // (size * max(1, config.world_size))),
        rows_per_step=rows,
    )


def _halve_evaluation(config: Config) -> Config | None:
    """Generation may take more rows at a time than --batch_size, so even one row is tried once by its own option."""
    if config.eval_batch_size == 1:
        return None
    return replace(config, eval_batch_size=max(1, (config.eval_batch_size or config.batch_size) // 2))


def describe_recovery(error: OutOfMemory, after: Config, *, step: int) -> Recovered:
    """Return the event for smaller micro-batches; `step` counts from 1."""
    if error.doing != STEP:
        return Recovered(
            step=step,
            doing=error.doing,
            cause=error.reason,
            changed={"eval_batch_size": after.eval_batch_size},
            next_time=f"--eval_batch_size {after.eval_batch_size}",
        )
    accumulation = after.gradient_accumulation_steps
    same_rows = after.batch_size * accumulation * max(1, after.world_size) == after.rows_per_step
    rest = f"--gradient_accumulation_steps {accumulation}" if same_rows else ""
    if not same_rows and "rows_per_step" not in after.sources:
        rest = f"--rows_per_step {after.rows_per_step}"
    return Recovered(
        step=step,
        doing=error.doing,
        cause=error.reason,
        changed={"batch_size": after.batch_size, "gradient_accumulation_steps": accumulation},
        next_time=f"--batch_size {after.batch_size} {rest}".strip(),
    )
