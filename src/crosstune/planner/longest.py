"""Search for the longest row whose step is predicted to fit into memory."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.estimate.fast_layers import HOST_SHARE, stream_bytes
from crosstune.estimate.memory import step_bytes
from crosstune.estimate.model_shape import Step
from crosstune.planner.find_fit import saving_options

STEP_TOKENS = 256
MOST_TOKENS = 2**26


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row of a plan, one row at a time."""

    as_planned: int
    """Tokens with the options of the plan; 0 if none fits."""
    with_savings: int
    """Tokens with `options` too."""
    options: dict[str, Any]
    """Options that save memory of long rows without changing the result; empty if the plan has them all."""
    trained_context: int | None
    """The longest row that the model's positions were trained for or are scaled to; None if unknown."""
    is_scaled: bool
    """True with --rope_scaling."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_longest(plan: Plan) -> LongestRow | None:
    """Return the longest row; None if the sizes of the model are unknown."""
    fitted = plan.fitted
    if fitted is None or not plan.usable_bytes:
        return None
    factor = fitted.estimated_bytes / max(1, fitted.parts.total)
    shape, devices = fitted.shape, max(1, len(plan.backend.devices))
    on_host = shape.num_layers * shape.hidden * stream_bytes(fitted.step)  # the inputs of recomputed layers
    host = int(HOST_SHARE * plan.machine.memory_total_bytes / devices)
    options, saving = saving_options(plan, fitted.step)

    def longest(step: Step) -> int:
        def fits(tokens: int) -> bool:
            supervised = tokens if step.supervised is None else step.supervised
            own = -(-tokens // step.row_parts)
            row = replace(step, batch=1, context=own, supervised=min(own, supervised))
            if step.offloads_activations and tokens * on_host > host:
                return False
            return step_bytes(shape, row) * factor <= plan.usable_bytes

        low, high = 0, STEP_TOKENS
        while high <= MOST_TOKENS and fits(high):
            low, high = high, 2 * high
        while high - low > STEP_TOKENS:
            middle = (low + high) // (2 * STEP_TOKENS) * STEP_TOKENS
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    as_planned = longest(fitted.step)
    with_savings = longest(saving) if options else as_planned
    if with_savings <= as_planned:
        options, with_savings = {}, as_planned
    return LongestRow(
        as_planned=as_planned,
        with_savings=with_savings,
        options=options,
        trained_context=shape.max_context or None,
        is_scaled=plan.config.rope_scaling != "none",
    )
