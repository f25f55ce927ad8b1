"""Take one optimizer step: retry with a smaller loss scale, raise before a non-finite update, halve micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.events import Recovered
from crosstune.core.out_of_memory import EVALUATING, GENERATING, STEP, OutOfMemory
from crosstune.core.protocols import Backward, Batch, PreparedBatch, Session
from crosstune.core.schedule import Extension, learning_rate, warmup_steps
from crosstune.data.batches.row_order import num_at_once, rows_per_step

START = 2.0**16
SMALLEST = 1.0
STEPS_TO_GROW = 200


def needs_loss_scale(precision: str) -> bool:
    """Return True if gradients in this --precision underflow without loss scaling."""
    return precision.startswith("fp16")


@dataclass
class LossScale:
    enabled: bool
    factor: float = 1.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        if self.enabled:
            self.factor = START

    def shrink(self) -> bool:
        """Halve the factor to retry the step; return False if it is at its minimum."""
        if not self.enabled or self.factor <= SMALLEST:
            return False
        self.factor /= 2
        self.good_steps = 0
        return True

    def grow(self) -> None:
        """Count a good step; double the factor after enough of them."""
        if not self.enabled:
            return
        self.good_steps += 1
        if self.good_steps >= STEPS_TO_GROW:
            self.factor, self.good_steps = min(self.factor * 2, START), 0

    def to_json(self) -> dict[str, Any]:
        return {"factor": self.factor, "good_steps": self.good_steps}

    def load(self, data: Mapping[str, Any]) -> None:
        """Restore the result of `to_json`; without scaling the factor remains 1."""
        if self.enabled:
            self.factor, self.good_steps = float(data["factor"]), int(data["good_steps"])


def take_step(
    session: Session,
    window: Sequence[PreparedBatch],
    *,
    lr: float,
    scale: LossScale | None = None,
    starting: Callable[[str], None] = lambda name: None,
) -> Backward:
    """Compute the gradients of a step's micro-batches and update the weights. Call `starting` with the name of each part.

    If this raises, the session and the scale are unchanged.
    """
    scale = scale if scale is not None else LossScale(enabled=False)
    check_weight(window)
    before = scale.to_json()
    while True:
        starting("backward")
        try:
            result = session.backward(window, loss_scale=scale.factor)
        except (OutOfMemory, PeerLost):
            session.discard()
            scale.load(before)
            raise
        if result.is_finite:
            break
        session.discard()
        if not (math.isfinite(result.loss) and scale.shrink()):
            scale.load(before)
            raise _nonfinite(result)
    starting("update")
    session.update(lr=lr)
    scale.grow()
    return result


def prepare_window(session: Session, window: Sequence[Batch]) -> list[PreparedBatch]:
    return [session.prepare(batch) for batch in window]


def check_weight(window: Sequence[PreparedBatch]) -> None:
    if not sum(batch.weight for batch in window):
        raise UserError(
            "This step has no supervised tokens or examples.",
            why="the total weight of its batches is 0: it has no supervised tokens, or no examples that count.",
        )


def _nonfinite(result: Backward) -> NonFiniteError:
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    return NonFiniteError(
        f"The {what} is not a finite number.",
        why="the step was stopped before the optimizer update; the weights of the previous step are unchanged.",
        do="lower --lr, use --precision bf16 or fp32, or look at the data of this step",
    )


def halve(config: Config, *, doing: str) -> Config | None:
    """Return the configuration with half as large micro-batches for the work that did not fit; None if it is impossible.

    A step keeps its rows; its last micro-batch may be shorter.
    """
    if doing == STEP and config.batch_size > 1:
        rows, size = rows_per_step(config), config.batch_size // 2
        return replace(
            config,
            batch_size=size,
            gradient_accumulation_steps=-(-rows // (size * num_at_once(config))),
            rows_per_step=rows,
        )
    # Generation may use more rows than --batch_size, so --eval_batch_size 1 is tried even where --batch_size is 1.
    if doing in (EVALUATING, GENERATING) and config.eval_batch_size != 1:
        return replace(config, eval_batch_size=max(1, (config.eval_batch_size or config.batch_size) // 2))
    return None


def describe_recovery(error: OutOfMemory, after: Config, *, step: int) -> Recovered:
    """Return the event for smaller micro-batches; `step` counts from 1."""
    changed = {"eval_batch_size": after.eval_batch_size}
    next_time = dict(changed)
    if error.doing == STEP:
        accumulation = {"gradient_accumulation_steps": after.gradient_accumulation_steps}
        changed = {"batch_size": after.batch_size, **accumulation}
        same_rows = math.prod((*changed.values(), num_at_once(after))) == after.rows_per_step
        rows = {} if "rows_per_step" in after.sources else {"rows_per_step": after.rows_per_step}
        next_time = {"batch_size": after.batch_size, **(accumulation if same_rows else rows)}
    options = " ".join(f"--{name} {value}" for name, value in next_time.items())
    return Recovered(step=step, doing=error.doing, cause=error.reason, changed=changed, next_time=options)


def rate_of_step(step: int, config: Config, *, num_steps: int, extension: Extension | None = None) -> float:
    """Return the learning rate of a step, counted from 0. `extension` replaces the schedule of an extended run."""
    if extension is not None:
        if extension.lr is not None:
            return extension.lr
        step, num_steps = step - extension.start, num_steps - extension.start
    curve: dict[str, Any] = {"schedule": config.lr_scheduler, "num_steps": num_steps}
    warmup = warmup_steps(**curve, steps=config.warmup_steps, ratio=config.warmup_ratio)
    return learning_rate(step, **curve, peak=config.lr, warmup=warmup, floor_ratio=config.cosine_min_lr_ratio)
