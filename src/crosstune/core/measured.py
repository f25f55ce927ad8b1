"""The loss measured on a few fixed batches, and the comparison of two such measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The loss of a few batches with the weights of a step, without dropout."""

    step: int
    first_step: int
    """The first step whose rows are measured."""
    num_steps: int
    """How many whole steps are measured: another machine may divide the rows of a step into other batches."""
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
        """Return the precision and the quantization, for people."""
        return f"{self.precision}, {self.quantization or 'not quantized'}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The same batches measured on two machines."""

    there: Measured
    """On the machine the run comes from."""
    here: Measured
    difference: float
    """Of the losses, relative."""
    bound: float
    """The largest difference that a move may make."""
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
