"""List what `plan` resolves but `train` cannot do yet. Remove an entry when its feature is implemented."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crosstune.config.conditions import Decided


@dataclass(frozen=True, kw_only=True)
class Unbuilt:
    summary: str
    """For the table of options."""
    what: str
    """For the error; a template for `Decided.values`."""
    do: str
    needed: Callable[[Decided], bool]
    """Return whether the plan needs it."""


LLAMA_PRO_ON_MLX = Unbuilt(
    summary="llama_pro on MLX",
    what="llama_pro on MLX",
    do="--train_type lora, or a torch backend",
    needed=lambda now: now.engine == "mlx" and now.method == "llama_pro",
)
