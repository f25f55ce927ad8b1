"""Small ways to use sessions that several tiers of tests share, and the names of the frameworks."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.core.protocols import Backward, Batch, Session
from crosstune.core.scaling import LossScale, needs_loss_scale
from crosstune.loop.step import prepare_window, take_step

FRAMEWORKS = frozenset({"torch", "transformers", "peft", "accelerate", "bitsandbytes", "mlx", "mlx_lm"})


def train_step(
    session: Session, window: Sequence[Batch], *, lr: float, scale: LossScale | None = None
) -> Backward:
    """Take one optimizer step as the loop does, on batches that are not prepared yet."""
    if scale is None:
        scale = LossScale(enabled=needs_loss_scale(session.plan.precision))  # type: ignore[attr-defined]
    return take_step(session, prepare_window(session, window), lr=lr, scale=scale)


def find_nonfinite(session: Session, window: Sequence[Batch]) -> str:
    return session.find_nonfinite(prepare_window(session, window))
