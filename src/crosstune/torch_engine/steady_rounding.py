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

DEVICES_WITH_FP64 = ("cpu", "cuda")
ROWS_AT_ONCE = {"cpu": 128}
"""Rows of one product. More of them keep more cores busy, and are more padding for few rows."""
ROWS_ON_GPU = 1024
FEW_ROWS = 64
"""Rows of one product with a head: few tokens reach it, and its output is wide."""
WIDE = 16384
SCORES_AT_ONCE = 2**25
"""Attention scores that are held in fp64 at once: 256 MiB."""


class SteadyRounding(TorchFunctionMode):
    """Inside the block, a model without gradients rounds each row of a batch in fp32 as it would round it alone.

    Products with weights are computed for a fixed number of rows at a time, the last ones filled up with zeros: one shape, so
    one kernel and one order of additions. Attention adds over the tokens of a row and over its padding, and the mean of a
    norm in an order of its own: these are computed in fp64 and rounded once, which gives the same fp32 number in any order,
    but for a few in a million. A device without fp64 keeps them as they are. 16-bit numbers are left alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        steady, options = _STEADY.get(func), dict(kwargs or {})
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
    found = _product(input.reshape(-1, input.shape[-1]), weight.t(), bias)
    return found.reshape(*input.shape[:-1], len(weight))


def _addmm(
    func: Callable[..., Any], bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute the product of GPT-2's layers, whose weights are transposed."""
    return func(bias, x, weight, **options) if options or bias.ndim != 1 else _product(x, weight, bias)


def _product(rows: torch.Tensor, columns: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply a fixed number of rows at a time. Written in place: joining the parts would cost as much as a product."""
    size = _rows_at_once(rows.device, outputs=columns.shape[1])
    found = rows.new_empty(len(rows), columns.shape[1])
    for start in range(0, len(rows), size):
        part, place = rows[start : start + size], found[start : start + size]
        missing = size - len(part)
        if missing:
            part, place = F.pad(part, (0, 0, 0, missing)), rows.new_empty(size, columns.shape[1])
        if bias is None:
            torch.mm(part, columns, out=place)
        else:
            torch.addmm(bias, part, columns, out=place)
        if missing:
            found[start:] = place[: size - missing]
    return found


def _rows_at_once(device: torch.device, *, outputs: int) -> int:
    return FEW_ROWS if outputs > WIDE else ROWS_AT_ONCE.get(device.type, ROWS_ON_GPU)


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
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if query.device.type not in DEVICES_WITH_FP64:
        return func(query, key, value, attn_mask=attn_mask, **options)
    scores = query.shape[1:-1].numel() * key.shape[-2]
    size = max(1, SCORES_AT_ONCE // max(1, scores))
    parts = []
    for start in range(0, len(query), size):  # without a kernel of its own, fp64 holds all scores in memory
        of = slice(start, start + size)
        mask = attn_mask
        if mask is not None:
            mask = mask[of] if mask.ndim == query.ndim and len(mask) == len(query) else mask
            mask = mask.double() if mask.is_floating_point() else mask
        wide = (query[of].double(), key[of].double(), value[of].double())
        parts.append(func(*wide, attn_mask=mask, **options).float())
    return torch.cat(parts)


def _in_fp64(func: Callable[..., Any], *args: Any, **options: Any) -> torch.Tensor:
    if args[0].device.type not in DEVICES_WITH_FP64:
        return func(*args, **options)
    wide = [value.double() if isinstance(value, torch.Tensor) else value for value in args]
    return func(*wide, **options).float()


_STEADY: dict[Any, Callable[..., torch.Tensor]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.scaled_dot_product_attention: _attention,
    torch.Tensor.mean: _in_fp64,
}


def widest(values: torch.Tensor) -> torch.Tensor:
    """Return values in fp64, or in fp32 on a device without it."""
    return values.double() if values.device.type in DEVICES_WITH_FP64 else values.float()
