"""Check that stored weights fit the weights that a session trains."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array


def check_fit(trained: Mapping[str, tuple[int, ...]], weights: Mapping[str, Array]) -> None:
    """Raise a UserError unless stored and trained weights have the same names and shapes."""
    missing, unknown = sorted(trained.keys() - weights.keys()), sorted(weights.keys() - trained.keys())
    shapes = [name for name in trained if name in weights and trained[name] != weights[name].shape]
    if not (missing or unknown or shapes):
        return
    named = [f"it lacks {name}" for name in missing[:3]] + [f"it has {name}" for name in unknown[:3]]
    named += [f"{name} is {weights[name].shape}, not {trained[name]}" for name in shapes[:3]]
    experts = any(".experts." in name for name in (*missing, *unknown))
    raise UserError(
        "The state does not fit the weights that this run trains.",
        why="; ".join(named),
        do="continue on the engine that wrote it: MLX adapts no experts. A run that is to move between engines needs "
        "--lora_target_modules attention from its start"
        if experts
        else "continue with the same method, rank and target modules as the run that wrote it",
    )
