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
        known: dict[str, Any] = {name: data.get(name) for name in cls.__dataclass_fields__}
        return cls(**known | {"loss": float(data["loss"])})

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
        numbers = {name: value for name, value in vars(self).items() if name not in ("there", "here")}
        return {"from": self.there.to_json(), "to": self.here.to_json(), **numbers}
