"""Run a model in fp32 so that a row's result does not depend on the rows beside it, on padding or on cached tokens.

A sum in fp32 is rounded in the order of its additions, and libraries choose that order by the shapes of their operands. So a
prompt gives other last digits alone than in a batch, and others after cached tokens than as a whole: after thirty layers they
are about 1e-5 of a log probability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from crosstune.torch_engine import steady_attention
from crosstune.torch_engine.steady_products import product

DEVICES_WITH_FP64 = ("cpu", "cuda")
SCORES_AT_ONCE = 2**25
"""Attention scores that are held in fp64 at once: 256 MiB."""


class SteadyRounding(TorchFunctionMode):
    """Inside the block, a model without gradients rounds each row of a batch in fp32 as it would round it alone.

    Products with weights are computed for numbers of rows that round alike, and attention on a CPU for numbers of keys that
    do. Other attention, activations on a CPU, and the mean of a norm, are computed in fp64 and rounded once, which gives the same fp32 number in any
    order, but for a few in a million. A device without fp64 keeps them as they are. 16-bit numbers are left alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        steady, options = _STEADY.get(func), kwargs or {}
        if steady is None or not _is_plain_fp32([*args, *options.values()]):
            return func(*args, **options)
        return steady(func, *args, **options)


def _is_plain_fp32(values: Iterable[Any]) -> bool:
    """Return whether all tensors are plain ones in fp32, masks aside, and computed as such: autocast takes 16 bits."""
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(found) and all(
        type(value) in (torch.Tensor, nn.Parameter)
        and value.dtype in (torch.float32, torch.bool)
        and not torch.is_autocast_enabled(value.device.type)
        for value in found
    )


def _linear(
    func: Callable[..., Any], input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.ndim != 2:
        return func(input, weight, bias)
    found = product(input.reshape(-1, input.shape[-1]), weight.t(), bias)
    return found.reshape(*input.shape[:-1], len(weight))


def _matmul(
    func: Callable[..., Any], input: torch.Tensor, other: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the product of Falcon's layers, which multiply with their weights without a function for it."""
    if options or other.ndim != 2:
        return func(input, other, **options)
    return _linear(func, input, other.t())


def _addmm(
    func: Callable[..., Any], input: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the product of GPT-2's layers, whose weights are transposed."""
    return func(input, mat1, mat2, **options) if options or input.ndim != 1 else product(mat1, mat2, input)


def _attention(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    if not dropout_p:
        found = steady_attention.attention(query, key, value, attn_mask, is_causal=is_causal, **options)
        if found is not None:
            return found
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if query.device.type not in DEVICES_WITH_FP64 or not query.numel():
        return func(query, key, value, attn_mask=attn_mask, **options)
    scores = query.shape[1:-1].numel() * key.shape[-2]
    count = len(query) if query.ndim < 3 else max(1, SCORES_AT_ONCE // max(1, scores))
    parts = []
    for start in range(0, len(query), count):
        rows = slice(start, start + count)
        of = [_rows_of(tensor, rows, beside=query) for tensor in (query, key, value, attn_mask)]
        parts.append(_attention_of_rows(func, *of, **options))
    return torch.cat(parts)


def _rows_of(tensor: torch.Tensor | None, rows: slice, *, beside: torch.Tensor) -> Any:
    """Return some rows of a batch, or the whole tensor where all rows share it."""
    shared = tensor is None or tensor.ndim < max(3, beside.ndim) or len(tensor) != len(beside)
    return tensor if tensor is None or shared else tensor[rows]


def _attention_of_rows(
    func: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    **options: Any,
) -> torch.Tensor:
    """Attend in fp64 for some queries at a time: where fp64 has no kernel of its own, all their scores are in memory."""
    length, seen = query.shape[-2], key.shape[-2]
    count = max(1, SCORES_AT_ONCE // max(1, query.shape[:-2].numel() * seen))
    if query.device.type == "cpu" and query.ndim == 4 and mask is None and key.shape[-1] == value.shape[-1]:
        count = (
            length  # this kernel holds few scores, and takes twice as long with a mask in place of is_causal
        )
    key, value, parts = key.double(), value.double(), []
    for start in range(0, length, count):
        stop, until, of, causal = start + count, seen, mask, is_causal
        if mask is not None and mask.ndim > 1 and mask.shape[-2] == length:
            of = mask[..., start:stop, :]
        elif is_causal and mask is None and count < length:
            until, causal = min(stop, length, seen), False
            of = torch.ones(min(stop, length) - start, until, dtype=torch.bool, device=query.device).tril(
                start
            )
        of = of.double() if of is not None and of.is_floating_point() else of
        part = query[..., start:stop, :].double()
        keys, values = key[..., :until, :], value[..., :until, :]
        parts.append(func(part, keys, values, attn_mask=of, is_causal=causal, **options).float())
    return torch.cat(parts, dim=-2)


def _mean(func: Callable[..., Any], input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    plain = input.dtype != torch.float32 or options.keys() & {"dtype", "out"}
    if plain or input.device.type not in DEVICES_WITH_FP64:
        return func(input, *args, **options)
    return func(input.double(), *args, **options).float()


def _activation(func: Callable[..., Any], input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Compute an activation that torch rounds in another way for the last elements of a thread's part on a CPU."""
    if input.device.type != "cpu" or options.get("inplace"):
        return func(input, *args, **options)
    return func(input.double(), *args, **options).float()


_STEADY: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    F.scaled_dot_product_attention: _attention,
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
    F.silu: _activation,
    F.gelu: _activation,
    F.softplus: _activation,
    F.mish: _activation,
    torch.sigmoid: _activation,
    torch.Tensor.sigmoid: _activation,
}


def widest(values: torch.Tensor) -> torch.Tensor:
    """Return values in fp64, or in fp32 on a device without it."""
    return values.double() if values.device.type in DEVICES_WITH_FP64 else values.float()
