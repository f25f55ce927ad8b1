"""Two machines on the same run: the loss of the same fixed batches, before and after a move."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.protocols import Batch, Recipe, Session

NUM_BATCHES = 4
# Largest relative difference of the loss that a move may make: numbers of another length, another quantized base.
BOUND, BOUND_REQUANTIZED = 0.02, 0.25


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The loss of a few batches as the weights of a step have it, without dropout."""

    step: int
    first_step: int
    """The step whose batches these begin with."""
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
            loss=float(data["loss"]),
            num_supervised=int(data["num_supervised"]),
            backend=str(data["backend"]),
            precision=str(data["precision"]),
            quantization=data.get("quantization"),
        )


def fixed_batches(recipe: Recipe, first_step: int) -> list[Batch]:
    """A few batches from a step on, the same wherever a run is."""
    windows = (recipe.window(step) for step in range(first_step, recipe.num_steps()))
    return list(itertools.islice(itertools.chain.from_iterable(windows), NUM_BATCHES))


def measure(
    session: Session,
    recipe: Recipe,
    *,
    step: int,
    backend: str,
    precision: str,
    quantization: str | None,
    first_step: int | None = None,
) -> Measured:
    """On the batches that come next, or from the start where a run is at its end; or on those of `first_step`."""
    if first_step is None:
        first_step = step if step < recipe.num_steps() else 0
    result = session.evaluate(fixed_batches(recipe, first_step))
    return Measured(
        step=step,
        first_step=first_step,
        loss=result.loss,
        num_supervised=result.num_supervised,
        backend=backend,
        precision=precision,
        quantization=quantization,
    )


def compare(there: Measured, here: Measured) -> dict[str, Any]:
    """Both losses, how far they are apart, and how far they may be."""
    bound = BOUND if there.quantization == here.quantization else BOUND_REQUANTIZED
    difference = abs(here.loss - there.loss) / max(abs(there.loss), 1e-12)
    return {
        "from": there.to_json(),
        "to": here.to_json(),
        "difference": difference,
        "bound": bound,
        "within": difference <= bound and there.num_supervised == here.num_supervised,
    }


def check(compared: Mapping[str, Any], *, allowed: bool) -> None:
    if compared["within"] or allowed:
        return
    there, here = compared["from"], compared["to"]
    raise UserError(
        "The run would not go on as it was.",
        why=f"the same batches have the loss {there['loss']:.6f} on {there['backend']} ({_words(there)}) and "
        f"{here['loss']:.6f} on {here['backend']} ({_words(here)}): {compared['difference']:.2%} apart, "
        f"{compared['bound']:.0%} at most.",
        do="use the same precision and bits on both sides, or add --allow_mismatch loss to go on all the same",
    )


def _words(side: Mapping[str, Any]) -> str:
    return f"{side['precision']}, {side['quantization'] or 'not quantized'}"
