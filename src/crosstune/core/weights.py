"""Define rules for trained weights that both engines share: Lion's constants, moving average, initialization, shape check."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array, Session, SessionState

LION_BETAS = (0.9, 0.99)
"""The decays of the average in an update of Lion, and of the average it keeps."""
SLOT = "average"
"""The average's name among the optimizer moments in a checkpoint."""


def averaged(session: Session) -> contextlib.AbstractContextManager[None]:
    """Use the session's averaged weights in the `with` block, if it keeps an average."""
    found: contextlib.AbstractContextManager[None] = getattr(session, "averaged", contextlib.nullcontext)()
    return found


def result_weights(state: SessionState) -> Mapping[str, Array]:
    """Return the weights of a checkpoint for its result: their average, if there is one."""
    return {**state.weights, **state.moments.get(SLOT, {})}


def kept_moments(state: SessionState, *, ema_decay: float) -> Mapping[str, Mapping[str, Array]]:
    """Return the moments to continue with: without --ema_decay, an earlier average would be used but never moved."""
    return {slot: arrays for slot, arrays in state.moments.items() if slot != SLOT or ema_decay}


def uniform_by_name(name: str, *, shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
    """Return values uniform in +-1/sqrt(fan_in), as usual for LoRA's A, from a stream that depends on name and seed."""
    digest = hashlib.sha256(name.encode()).digest()
    key = (seed, int.from_bytes(digest[:8], "little"))
    bound = 1.0 / np.sqrt(shape[1])
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.uniform(-bound, bound, size=shape).astype(np.float32)


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
        "The state does not match the weights that this run trains.",
        why="; ".join(named),
        do="continue on the engine that wrote it: MLX does not adapt experts. A run that is to move between engines needs "
        "--lora_target_modules attention from its start"
        if experts
        else "continue with the same method, rank and target modules as the run that wrote it",
    )
