"""Two machines on the same run: the loss of the same fixed batches, before and after a move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """The step whose rows these begin with."""
    num_steps: int
    """As many steps' rows as are compared: how a step divides into batches may be another matter elsewhere."""
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


def _windows(recipe: Recipe, *, step: int, like: Measured | None) -> tuple[int, list[Sequence[Batch]]]:
    """The rows of a few whole steps, the same wherever a run is: those that come next, or the first ones where it is
    at its end; or those that were measured before."""
    if like is not None:
        last = min(like.first_step + like.num_steps, recipe.num_steps())
        return like.first_step, [recipe.window(number) for number in range(like.first_step, last)]
    first = step if step < recipe.num_steps() else 0
    windows: list[Sequence[Batch]] = []
    while sum(map(len, windows)) < NUM_BATCHES and first + len(windows) < recipe.num_steps():
        windows.append(recipe.window(first + len(windows)))
    return first, windows


def measure(
    session: Session,
    recipe: Recipe,
    *,
    step: int,
    backend: str,
    precision: str,
    quantization: str | None,
    like: Measured | None = None,
) -> Measured:
    """On the rows of a few steps; on the same as `like` was."""
    first_step, windows = _windows(recipe, step=step, like=like)
    result = session.evaluate([batch for window in windows for batch in window])
    return Measured(
        step=step,
        first_step=first_step,
        num_steps=len(windows),
        loss=result.loss,
        num_supervised=result.weight,
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
        "same_rows": there.num_supervised == here.num_supervised,
    }


def check(compared: Mapping[str, Any], *, allowed: bool) -> None:
    if compared["within"] or allowed:
        return
    there, here = compared["from"], compared["to"]
    if not compared["same_rows"]:
        raise UserError(
            "What the move changes cannot be told.",
            why=f"the rows that were measured on {there['backend']} have {there['num_supervised']:,} tokens that carry "
            f"loss, and those of the same steps here {here['num_supervised']:,}.",
            do="continue with as many steps as the run has, its data and its rows per step, or add --allow_mismatch loss",
        )
    raise UserError(
        "The run would not go on as it was.",
        why=f"the same batches have the loss {there['loss']:.6f} on {there['backend']} ({_words(there)}) and "
        f"{here['loss']:.6f} on {here['backend']} ({_words(here)}): {compared['difference']:.2%} apart, "
        f"{compared['bound']:.0%} at most.",
        do="use the same precision and bits on both sides, or add --allow_mismatch loss to go on all the same",
    )


def _words(side: Mapping[str, Any]) -> str:
    return f"{side['precision']}, {side['quantization'] or 'not quantized'}"
