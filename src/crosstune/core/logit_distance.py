"""Measure the distance between two models by their logits on a few prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError

Logits = list[NDArray[np.float32]]
Prompts = Sequence[Sequence[int]]

# The largest `relative` that rounding explains, by the coarser of the two dtypes. A wrong layout, scale or
# rotation gives values near 1.
BOUNDS = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "q8_0": 0.1, "8": 0.15, "6": 0.3, "5": 0.5, "4": 0.8}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The distance between two sets of logits. `relative` is the norm of the difference over the norm of the reference,
    both centered, as softmax ignores the mean."""

    max_abs: float
    mean_kl: float
    top1: float
    relative: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_agreement(reference: Logits, other: Logits) -> Agreement:
    """Compare every position of every prompt; the KL divergence is KL(reference || other), in nats."""
    max_abs, kl, same, count = 0.0, 0.0, 0, 0
    squared_difference, squared_reference = 0.0, 0.0
    for expected, found in zip(reference, other, strict=True):
        assert expected.shape == found.shape, (expected.shape, found.shape)
        ours, theirs = expected.astype(np.float64), found.astype(np.float64)
        max_abs = float(np.maximum(max_abs, np.abs(ours - theirs).max()))  # keeps a NaN, which max() drops
        p, q = _log_softmax(ours), _log_softmax(theirs)
        kl += float((np.exp(p) * (p - q)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(ours)
        centered = ours - ours.mean(-1, keepdims=True)
        squared_difference += float(((theirs - theirs.mean(-1, keepdims=True) - centered) ** 2).sum())
        squared_reference += float((centered**2).sum())
    return Agreement(
        max_abs=max_abs,
        mean_kl=float(np.maximum(0.0, kl / count)),
        top1=same / count,
        relative=(squared_difference / squared_reference) ** 0.5 if squared_reference else 0.0,
    )


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def check_finite(logits: Logits, name: str) -> Logits:
    """Return the logits of a source; raise a UserError if they are not finite, since no result can agree with them."""
    if all(np.isfinite(each).all() for each in logits):
        return logits
    raise UserError(
        f"{name} computes logits that are not finite.",
        why="its weights have NaN or infinite values, or are too large for the precision.",
        do="train it again with a lower --lr, or use an earlier checkpoint: crosstune checkpoint list RUN",
    )
