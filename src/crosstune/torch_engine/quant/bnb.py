"""bitsandbytes: 4-bit NormalFloat or float with double quantization, and 8-bit integers with row-wise scales."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec

if TYPE_CHECKING:
    import torch

LIBRARY = "bitsandbytes"
BITS = (4, 8)
EXTRA = "bnb"
PREFERENCE = 10
BITS_BY_ROW = (8,)
BITS_WITH_DOUBLE_QUANT = (4,)
TAKES_KIND = True
USUAL_KINDS = {4: "nf4"}
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_INT8_LIMIT = 127.0
SLICE = 2**20
"""Weights quantized at once on the CPU; a multiple of every block size."""
_FACTS = ("shape", "quant_type", "blocksize", "nested_blocksize", "nested_dtype")


def check(spec: QuantSpec, shape: tuple[int, int]) -> None:
    if spec.bits == 4 and spec.group_size not in BLOCK_SIZES:
        raise UserError(
            f"bitsandbytes does not support block size {spec.group_size}.",
            do=f"use --group_size {', '.join(map(str, BLOCK_SIZES))}",
        )
    allowed = ("auto", "nf4", "fp4") if spec.bits == 4 else ("auto", "int")
    if spec.kind not in allowed:
        raise UserError(
            f"bitsandbytes does not support --quant_type {spec.kind} with {spec.bits} bits.",
            do=f"use one of {', '.join(allowed)}",
        )


def quantize(
    weight: torch.Tensor, spec: QuantSpec, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    import bitsandbytes.functional as bnb
    import torch

    shape = {"shape": list(weight.shape)}
    if spec.bits == 8:
        packed, scale, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
        return {"packed": packed, "scale": scale}, shape
    kind = spec.resolved_kind()
    if weight.device.type != "cpu" or weight.numel() <= SLICE:
        packed, state = bnb.quantize_4bit(
            weight.contiguous(), blocksize=spec.group_size, compress_statistics=spec.double, quant_type=kind
        )
    else:
        packed, state = _quantize_in_slices(weight, spec, kind)
    # bitsandbytes shares one table among all weights; files and copies of a model need separate ones.
    tensors = {"packed": packed, "absmax": state.absmax, "quant_map": state.code.clone()}
    facts: dict[str, Any] = {**shape, "quant_type": state.quant_type, "blocksize": state.blocksize}
    if state.nested:
        inner = state.state2
        tensors |= {"nested_absmax": inner.absmax, "nested_quant_map": inner.code.clone()}
        tensors |= {"nested_offset": state.offset}
        dtype_name = str(inner.dtype).removeprefix("torch.")
        facts |= {"nested_blocksize": inner.blocksize, "nested_dtype": dtype_name}
    return tensors, facts


def _quantize_in_slices(weight: torch.Tensor, spec: QuantSpec, kind: str) -> tuple[torch.Tensor, Any]:
    """Quantize slice by slice, with the same result: on the CPU the library compares all weights with 16 codes at once."""
    import bitsandbytes.functional as bnb
    import torch

    parts = [
        bnb.quantize_4bit(part, blocksize=spec.group_size, compress_statistics=False, quant_type=kind)
        for part in weight.flatten().split(SLICE)
    ]
    packed = torch.cat([part for part, _ in parts])
    state = parts[0][1]
    state.shape = weight.shape
    state.absmax = torch.cat([each.absmax for _, each in parts])
    if spec.double:
        state.offset = state.absmax.mean()
        state.absmax, state.state2 = bnb.quantize_blockwise(state.absmax - state.offset, blocksize=256)
        state.nested = True
    return packed, state


def dequantize(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    import torch
    from bitsandbytes import functional as bnb

    if "absmax" not in tensors:
        scale = (tensors["scale"].float() / _INT8_LIMIT)[:, None]
        return (tensors["packed"].float() * scale).to(dtype)
    inner = None
    if "nested_absmax" in tensors:
        inner = bnb.QuantState(
            absmax=tensors["nested_absmax"],
            code=tensors["nested_quant_map"],
            blocksize=facts["nested_blocksize"],
            dtype=getattr(torch, facts["nested_dtype"]),
        )
    shape = torch.Size(facts["shape"])
    state = bnb.QuantState(
        absmax=tensors["absmax"],
        shape=torch.Size(_whole_blocks(shape, facts["blocksize"])),
        code=tensors["quant_map"],
        blocksize=facts["blocksize"],
        quant_type=facts["quant_type"],
        dtype=dtype,
        offset=tensors.get("nested_offset"),
        state2=inner,
    )
    return bnb.dequantize_4bit(tensors["packed"], state).reshape(shape)


def dequantize_stack(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Dequantize matrices that are stacked along the first dimension, with the same bits as one by one."""
    import torch

    packed, (rows, columns) = tensors["packed"], facts["shape"]
    count = len(packed)
    if "absmax" not in tensors or rows * columns % facts["blocksize"]:
        each = ({name: tensor[number] for name, tensor in tensors.items()} for number in range(count))
        return torch.stack([dequantize(parts, facts, dtype) for parts in each])
    absmax = tensors["absmax"]
    if "nested_absmax" in tensors:
        tables = tensors["nested_quant_map"]
        first = torch.arange(count, dtype=torch.int32, device=absmax.device)[:, None] * tables.shape[1]
        codes = (absmax.int() + first).flatten()
        scales = tensors["nested_absmax"].repeat_interleave(facts["nested_blocksize"], dim=1)
        absmax = tables.flatten().index_select(0, codes).view(count, -1) * scales[:, : absmax.shape[1]]
        absmax = absmax + tensors["nested_offset"][:, None]
    parts = {
        "packed": packed.reshape(-1, 1),
        "absmax": absmax.flatten(),
        "quant_map": tensors["quant_map"][0],
    }
    flat = dequantize(parts, {**facts, "shape": [count * rows, columns]}, dtype)
    return flat.view(count, rows, columns)


def _whole_blocks(shape: Sequence[int], blocksize: int) -> tuple[int, ...]:
    """Return a shape with the same number of weights whose rows are whole blocks. Blocks cross rows, but bitsandbytes' CPU
    kernel starts a new block in each row."""
    if shape[-1] % blocksize == 0:
        return tuple(shape)
    count = math.prod(shape)
    return (count // blocksize, blocksize) if count % blocksize == 0 else (1, count)


def restore(
    tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read folders of bitsandbytes and of older crosstune versions, where the offset is in JSON."""
    import torch

    found = dict(tensors)
    if "nested_absmax" in found and "nested_offset" not in found:
        found["nested_offset"] = torch.tensor(float(facts["nested_offset"]), device=found["packed"].device)
    return found, {name: facts[name] for name in _FACTS if name in facts}
