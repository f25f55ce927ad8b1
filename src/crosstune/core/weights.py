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
"""Lion's decays: for the average in an update, and for the stored average."""
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


def orthogonal_by_name(
    name: str, *, shape: tuple[int, int], rank: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return random A and B for a layer of `shape` (outputs, inputs) with B A = 0, distributed as in PEFT; `rank` is even."""
    digest = hashlib.sha256(name.encode()).digest()
    draw = np.random.Generator(np.random.Philox(key=(seed, int.from_bytes(digest[:8], "little"))))
    rows, _ = np.linalg.qr(draw.standard_normal((rank, rank)))
    a = (draw.standard_normal((shape[1], rank // 2)) @ rows[0::2]).T / 10
    b = draw.standard_normal((shape[0], rank // 2)) @ rows[1::2] / 10
    return np.ascontiguousarray(a, dtype=np.float32), np.ascontiguousarray(b, dtype=np.float32)


def principal_factors(
    weight: NDArray[np.float32], *, rank: int, scale: float, start: str = "pissa"
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return PiSSA's A and B: scale * B A is the best approximation of the weight at this rank. LoftQ factors the error of
    a quantized weight.

    Both have the square roots of the singular values. The sign of each pair makes the largest entry of A positive.
    """
    if rank > min(weight.shape):
        raise UserError(
            f"--init_lora {start} needs a --lora_rank of at most {min(weight.shape)}.",
            why=f"a weight of {weight.shape[0]} x {weight.shape[1]} has no more singular values.",
        )
    wide = weight.astype(np.float64) if weight.shape[0] <= weight.shape[1] else weight.T.astype(np.float64)
    squares, vectors = np.linalg.eigh(wide @ wide.T)  # faster than an SVD, and exact enough in fp64
    short = vectors[:, ::-1][:, :rank]
    values = np.sqrt(np.maximum(squares[::-1][:rank], np.finfo(np.float64).tiny))
    long = short.T @ wide / values[:, None]
    left, right = (short, long) if wide.shape == weight.shape else (long.T, short.T)
    signs = np.sign(right[np.arange(rank), np.abs(right).argmax(axis=1)])
    root = np.sqrt(values / scale)
    a, b = (root * signs)[:, None] * right, left * (root * signs)
    return np.ascontiguousarray(a, dtype=np.float32), np.ascontiguousarray(b, dtype=np.float32)


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
