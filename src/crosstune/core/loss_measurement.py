"""Define the measurement of the loss on a few fixed batches, and the comparison of two measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LossMeasurement:
    """The loss on a few batches with the weights of a step, without dropout."""

    step: int
    first_step: int
    """The first measured step."""
    num_steps: int
    """Whole steps are measured: a different machine may use different micro-batches."""
    loss: float
    num_supervised: int
    backend: str
    precision: str
    quantization: str | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LossMeasurement:
        numbers = {name: int(data[name]) for name in ("step", "first_step", "num_steps", "num_supervised")}
        return cls(
            **numbers,
            loss=float(data["loss"]),
            backend=str(data["backend"]),
            precision=str(data["precision"]),
            quantization=data.get("quantization"),
        )

    def terms(self) -> str:
        """Return precision and quantization as a string."""
        return f"{self.precision}, {self.quantization or 'not quantized'}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same batches measured on two machines."""

    there: LossMeasurement
    """On the source machine of the move."""
    here: LossMeasurement
    difference: float
    """The relative difference of the losses."""
    bound: float
    """The largest accepted difference."""
    within: bool
    same_rows: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "from": self.there.to_json(),
            "to": self.here.to_json(),
            "difference": self.difference,
            "bound": self.bound,
            "within": self.within,
            "same_rows": self.same_rows,
        }
