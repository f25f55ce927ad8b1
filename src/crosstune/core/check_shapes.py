"""Whether stored weights are those that a session trains."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array


def check_fit(own: Mapping[str, tuple[int, ...]], weights: Mapping[str, Array]) -> None:
    """Raise unless every trained weight is there, in the shape it has, and nothing else."""
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [name for name in own if name in weights and own[name] != weights[name].shape]
    if not (missing or unknown or shapes):
        return
    named = [f"it lacks {name}" for name in missing[:3]] + [f"it has {name}" for name in unknown[:3]]
    named += [f"{name} is {weights[name].shape}, not {own[name]}" for name in shapes[:3]]
    raise UserError(
        "The state does not fit what this run trains.",
        why="; ".join(named),
        do="continue with the options of the run it is from: method, rank, target modules",
    )
