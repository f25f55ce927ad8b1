"""Judge the evaluations of a run: the best step, whether to stop early, and what to warn of."""

from __future__ import annotations

import math
from collections.abc import Mapping

WORSE = 1.02
"""An evaluation loss above this multiple of the best one counts as worse, not as noise."""

Losses = Mapping[int, float]
"""Step -> evaluation loss."""


def trained_losses(evaluations: Losses) -> dict[int, float]:
    """Return the finite evaluation losses after at least one step, in the order of steps."""
    return {
        step: evaluations[step] for step in sorted(evaluations) if step and math.isfinite(evaluations[step])
    }


def best_step(evaluations: Losses) -> int | None:
    """Return the step with the lowest evaluation loss, the earliest of equal ones; None without an evaluation."""
    losses = trained_losses(evaluations)
    return min(losses, key=lambda step: (losses[step], step)) if losses else None


def stops_early(evaluations: Losses, *, patience: int) -> bool:
    """Return whether the last `patience` evaluations brought no improvement; never if `patience` is 0."""
    if not patience:
        return False
    # Without a single finite loss, none was an improvement over the start.
    best = best_step(evaluations) or 0
    return sum(step > best for step in evaluations) >= patience


def early_stopping_message(evaluations: Losses, *, patience: int) -> str:
    last = [evaluations[step] for step in sorted(evaluations)[-patience:]]
    if not any(math.isfinite(loss) for loss in last):
        return f"stopped early: the loss of {patience} evaluations in a row is not finite"
    return f"stopped early: no lower evaluation loss in {patience} evaluations"


def evaluation_warning(evaluations: Losses) -> tuple[str, str]:
    """Return the problem of the last evaluation as a word and a sentence; both empty without one."""
    last = max(evaluations, default=0)
    if not math.isfinite(evaluations.get(last, 0.0)):
        return "not finite", (
            f"the evaluation loss at step {last} is {evaluations[last]}, so these weights count as no improvement; "
            "check the held-out data, or try --precision fp32 or a lower --lr"
        )
    if overfits(evaluations):
        return "overfitting", overfitting_warning(evaluations)
    return "", ""


def overfits(evaluations: Losses) -> bool:
    """Return whether the evaluation loss has risen clearly above its best and not come back."""
    losses, best = trained_losses(evaluations), best_step(evaluations)
    if best is None:
        return False
    last = losses[max(losses)]
    return last > WORSE * losses[best] if losses[best] > 0 else last > losses[best]


def overfitting_warning(evaluations: Losses) -> str:
    losses, best = trained_losses(evaluations), best_step(evaluations)
    assert best is not None
    last = max(losses)
    return (
        f"overfitting: the evaluation loss was {losses[best]:.4f} at step {best} and is {losses[last]:.4f} at step {last}; "
        "train fewer steps (--early_stopping stops by itself), lower --lr, or add data"
    )
