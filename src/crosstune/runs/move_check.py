"""Compare the loss of the same batches before and after a run moves to a different backend."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.loss_measurement import Comparison, LossMeasurement
from crosstune.core.protocols import Batch, Recipe, Session
from crosstune.runs.resume_identity import quantization_name

NUM_BATCHES = 4
BOUND, BOUND_REQUANTIZED = 0.02, 0.25
"""Maximum relative change of the loss after a change of precision, and after requantizing the base."""


def measure(
    session: Session, recipe: Recipe, plan: Plan, *, step: int, like: LossMeasurement | None = None
) -> LossMeasurement:
    """Measure the loss on a few steps: the steps of `like`, otherwise the next steps, or the first steps if the run is at
    its end."""
    last_step = recipe.num_steps()
    windows: list[Sequence[Batch]] = []
    if like is not None:
        first_step = like.first_step
        last = min(first_step + like.num_steps, last_step)
        windows = [recipe.micro_batches(number) for number in range(first_step, last)]
    else:
        first_step = step if step < last_step else 0
        while sum(map(len, windows)) < NUM_BATCHES and first_step + len(windows) < last_step:
            windows.append(recipe.micro_batches(first_step + len(windows)))
    result = session.evaluate([batch for window in windows for batch in window])
    return LossMeasurement(
        step=step,
        first_step=first_step,
        num_steps=len(windows),
        loss=result.loss,
        num_supervised=result.weight,
        backend=plan.backend.name,
        precision=plan.precision,
        quantization=quantization_name(plan),
    )


def compare(there: LossMeasurement, here: LossMeasurement) -> Comparison:
    """Compare the losses before and after a move."""
    bound = BOUND if there.quantization == here.quantization else BOUND_REQUANTIZED
    difference = abs(here.loss - there.loss) / max(abs(there.loss), 1e-12)
    same_rows = there.num_supervised == here.num_supervised
    return Comparison(
        there=there,
        here=here,
        difference=difference,
        bound=bound,
        within=difference <= bound and same_rows,
        same_rows=same_rows,
    )


def check(compared: Comparison, *, allowed: bool, flag: str = "--allow_mismatch loss") -> None:
    """Raise if the move changes the loss by more than the bound, unless `allowed`; the error suggests `flag`."""
    if compared.within or allowed:
        return
    there, here = compared.there, compared.here
    if not compared.same_rows:
        raise UserError(
            "The effect of the move cannot be measured.",
            why=f"the same steps have {there.num_supervised:,} supervised tokens on {there.backend} and "
            f"{here.num_supervised:,} on {here.backend}.",
            do=f"continue with the number of steps, data and rows per step of the run, or add {flag}",
        )
    raise UserError(
        "The move changes the model too much.",
        why=f"the same batches have a loss of {there.loss:.6f} on {there.backend} ({there.terms()}) and "
        f"{here.loss:.6f} on {here.backend} ({here.terms()}): {compared.difference:.2%} apart, "
        f"and {compared.bound:.0%} is allowed.",
        do=f"use the same precision and bits on both sides, or add {flag} to continue anyway",
    )
