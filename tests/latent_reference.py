"""Compute the latent-diffusion model and its losses in numpy, in fp64, one row at a time and without padding.

Written from the description of the model alone: a joint block has weights of its own for each modality, adaptive layer norm
from both times, normalised queries and keys, and gates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]
_TORCH_EPSILON = float(np.finfo(np.float32).eps)


def predict(
    weights: Weights, row: Mapping[str, Any], *, heads: int, blocks: int, latent_tokens: int
) -> dict[str, Array]:
    """Return logits of all tokens, the predicted vector and the logits of the length, for one row."""
    text = weights["token_embedding.weight"][row["tokens"]]
    text = text + weights["position_embedding.weight"][: len(text)]
    latent = _linear(weights, "latent_in", row["latent"]).reshape(latent_tokens, -1)
    latent = (weights["null_latent"] if row["without_latent"] else latent) + weights["latent_position"]
    length = _linear(weights, "length_out", _gelu(_linear(weights, "length_in", latent.reshape(-1))))
    times = [_time(weights, "text_time", row["text_time"]), _time(weights, "latent_time", row["latent_time"])]
    hidden = _silu(_linear(weights, "times_in", _silu(np.concatenate(times))))
    cond = _silu(_linear(weights, "times_out", hidden))
    for number in range(blocks):
        text, latent = _block(weights, f"blocks.{number}", text, latent, cond, heads=heads)
    states = _adapt(text, *np.split(_linear(weights, "text_modulation", cond), 2))
    vector = _adapt(latent, *np.split(_linear(weights, "latent_modulation", cond), 2))
    return {
        "logits": states @ weights["token_embedding.weight"].T + weights["text_bias"],
        "latent": _linear(weights, "latent_head", vector.reshape(-1)),
        "length": length,
    }


def cross_entropy(logits: Array, target: int) -> float:
    highest = logits.max()
    return float(highest + np.log(np.exp(logits - highest).sum()) - logits[target])


def _block(
    weights: Weights, name: str, text: Array, latent: Array, cond: Array, *, heads: int
) -> tuple[Array, Array]:
    parts, queries, keys, values = {}, [], [], []
    for kind, x in (("text", text), ("latent", latent)):
        stream = f"{name}.{kind}"
        parts[kind] = np.split(_linear(weights, f"{stream}.modulation", cond), 6)
        mixed = _linear(weights, f"{stream}.qkv", _adapt(x, parts[kind][0], parts[kind][1]))
        query, key, value = mixed.reshape(len(x), 3, heads, -1).transpose(1, 2, 0, 3)
        queries.append(_rms(query) * weights[f"{stream}.q_norm"])
        keys.append(_rms(key) * weights[f"{stream}.k_norm"])
        values.append(value)
    attended = _attend(*(np.concatenate(found, axis=1) for found in (queries, keys, values)))
    return (
        _finish(weights, f"{name}.text", text, attended[: len(text)], parts["text"][2:]),
        _finish(weights, f"{name}.latent", latent, attended[len(text) :], parts["latent"][2:]),
    )


def _attend(query: Array, key: Array, value: Array) -> Array:
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[-1])
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    found = chances / chances.sum(-1, keepdims=True) @ value
    joined: Array = found.transpose(1, 0, 2).reshape(query.shape[1], -1)
    return joined


def _finish(weights: Weights, name: str, x: Array, attended: Array, parts: list[Array]) -> Array:
    gate, shift, scale, last_gate = parts
    x = x + gate * _linear(weights, f"{name}.out", attended)
    inner = _linear(weights, f"{name}.up", _adapt(x, shift, scale))
    curve = math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)
    return x + last_gate * _linear(weights, f"{name}.down", 0.5 * inner * (1 + np.tanh(curve)))


def _time(weights: Weights, name: str, time: float) -> Array:
    angles = 1000.0 * time * 10_000.0 ** (-np.arange(128) / 128)
    waves = np.concatenate([np.cos(angles), np.sin(angles)])
    return _linear(weights, f"{name}.outer", _silu(_linear(weights, f"{name}.inner", waves)))


def _adapt(x: Array, shift: Array, scale: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    found: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * (1 + scale) + shift
    return found


def _rms(x: Array) -> Array:
    found: Array = x / np.sqrt((x**2).mean(-1, keepdims=True) + _TORCH_EPSILON)
    return found


def _linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
