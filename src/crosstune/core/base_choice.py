"""Define what opening a model for training decides about its frozen base beyond the options of the run."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.core.quantization import QuantSpec


@dataclass(frozen=True, kw_only=True)
class BaseChoice:
    """Hold what a pass over the model decided. It is recorded, so that the base is the same whenever it is opened again."""

    quantizer: str
    """The quantizer of the base that it was decided for; over another one it means nothing."""
    kept: tuple[str, ...] = ()
    """`QuantSpec.kept`: the layers that have their original weights."""
    outside_fp8: tuple[str, ...] | None = None
    """The groups of fast layers that multiply densely while the others multiply in fp8. None if that is not chosen yet,
    which changes no weight any more."""


def recorded_choice(spec: QuantSpec | None) -> BaseChoice | None:
    """Return the choice that the quantization of a finished training records; None for a base that is not quantized."""
    return BaseChoice(quantizer=spec.quantizer, kept=spec.kept) if spec is not None else None
