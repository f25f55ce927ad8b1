"""Find the parts of a plan that are not implemented yet."""

from __future__ import annotations

from crosstune.config.conditions import Decided
from crosstune.config.plan import Plan
from crosstune.config.schema import Config, option_list
from crosstune.config.unbuilt import Unbuilt
from crosstune.core.errors import UserError
from crosstune.core.quantizers import read_quantizers


def unbuilt_parts(plan: Plan) -> list[UserError]:
    """Return one error for each part of the plan that is not implemented yet."""
    decided = Decided(
        options=plan.config.options(),
        engine=plan.engine,
        method=plan.method,
        quantizer=read_quantizers()[plan.quantizer] if plan.quantizer != "none" else None,
        n_bits=plan.n_bits,
        world_size=plan.world_size,
    )
    return [
        UserError(
            f"Not built yet: {part.what.format(**decided.values())}.", why=_asked_by(part, plan), do=part.do
        )
        for part in _declared()
        if part.needed(decided)
    ]


def can_use_several_devices(engine: str) -> bool:
    """Return whether `train` can use several devices, or processes, with an engine."""
    decided = Decided(
        options=Config().options(), engine=engine, method="lora", quantizer=None, n_bits=16, world_size=2
    )
    return not any(part.needed(decided) for part in _declared())


def _declared() -> list[Unbuilt]:
    return list(dict.fromkeys(option.unbuilt for option in option_list() if option.unbuilt is not None))


def _asked_by(part: Unbuilt, plan: Plan) -> str:
    """Return which of the options that were set may ask for it."""
    asked = [f"--{o.name}" for o in option_list() if o.unbuilt == part and o.name in plan.config.asked]
    return f"asked for by {', '.join(asked)}." if asked else ""
