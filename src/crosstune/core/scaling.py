"""Scale the loss for fp16: halve the scale when gradients overflow, and double it after enough good steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

START = 2.0**16
SMALLEST = 1.0
STEPS_TO_GROW = 200


def needs_loss_scale(precision: str) -> bool:
    """Return whether gradients in this --precision underflow without loss scaling."""
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
        """Halve the factor, so that the step can be tried again; return False when it is at its minimum."""
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
        """Restore the result of `to_json`; without scaling the factor stays at 1."""
        if self.enabled:
            self.factor, self.good_steps = float(data["factor"]), int(data["good_steps"])
