"""Advise on a run that did not fit into memory, from its own plan."""

from __future__ import annotations

from crosstune.config.load import backend_variables
from crosstune.config.memory_advice import Need, advise
from crosstune.config.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.out_of_memory import EVALUATING, GENERATING, LOADING, OutOfMemory

_NEEDS: dict[str, Need] = {LOADING: "weights", EVALUATING: "forward", GENERATING: "forward"}


def with_advice(error: OutOfMemory, plan: Plan, *, longest_row: int | None) -> OutOfMemory:
    """Return the error with advice that the run does not follow already; `longest_row` is in tokens."""
    advice = advise(
        plan.config.options(),
        report=plan.backend,
        spec=backend_specs()[plan.backend.name],
        method=plan.method,
        quantizer=plan.quantizer,
        environment=backend_variables(),
        need=_NEEDS.get(error.doing, "step"),
        longest_row=longest_row,
    )
    return error.with_advice(advice.sentence_after_failure())
