"""Define the loss measured on a few fixed batches, and the comparison of two such measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The loss on a few batches with the weights of a step, without dropout."""

    step: int
    first_step: int
    """The first measured step."""
    num_steps: int
    """Number of whole steps measured, since another machine may divide the rows of a step into other micro-batches."""
    loss: float
    num_supervised: int
    backend: str
    precision: str
    quantization: str | None

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measured:
        return cls(
            step=int(data["step"]),
            first_step=int(data["first_step"]),
            num_steps=int(data["num_steps"]),
            loss=float(data["loss"]),
            num_supervised=int(data["num_supervised"]),
            backend=str(data["backend"]),
            precision=str(data["precision"]),
            quantization=data.get("quantization"),
        )

    def terms(self) -> str:
        """Return the precision and the quantization as text."""
        return f"{self.precision}, {self.quantization or 'not quantized'}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same batches measured on two machines."""

    there: Measured
    """On the machine that the run comes from."""
    here: Measured
    difference: float
    """The relative difference of the losses."""
    bound: float
    """The largest difference that is accepted."""
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
