"""Take one optimizer step: retry with a smaller loss scale, and raise before a non-finite update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.out_of_memory import OutOfMemory
from crosstune.core.protocols import Backward, Batch, PreparedBatch, Session
from crosstune.core.scaling import LossScale


def take_step(
    session: Session,
    window: Sequence[PreparedBatch],
    *,
    lr: float,
    scale: LossScale | None = None,
    starting: Callable[[str], None] = lambda name: None,
) -> Backward:
    """Compute the gradients of a window and update the weights, telling `starting` what begins.

    If this raises, session and scale are unchanged.
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
            "There is nothing to learn in this step.",
            why="the weight of its batches is 0: none of its tokens is supervised, or none of its examples counts.",
        )


def _nonfinite(result: Backward) -> NonFiniteError:
    what = "loss" if not math.isfinite(result.loss) else "gradient"
    return NonFiniteError(
        f"The {what} is not a finite number.",
        why="the step was stopped before the optimizer update; the weights of the previous step are unchanged.",
        do="lower --lr, use --precision bf16 or fp32, or look at the data of this step",
    )
