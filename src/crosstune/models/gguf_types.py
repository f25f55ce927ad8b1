"""Choose the GGML type of each tensor by the rules of llama.cpp's recipes, and quantize to it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.quantization import GGUF_BLOCKS as BLOCKS
from crosstune.core.quantization import GGUF_PLAIN as PLAIN
from crosstune.core.quantization import GGUF_RECIPES as RECIPES
from crosstune.models import llama_cpp

_FALLBACKS = {"IQ4_XS": "IQ4_NL", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""For rows that are not a multiple of 256 weights."""
_LARGEST_HALF = 65504.0
_IN_HALF = {"F32", "BF16"}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named type of a GGUF file, and the facts of the model that its rules use."""

    kind: str
    num_layers: int
    num_experts: int = 1
    num_groups: int = 1
    """Attention heads that share a key."""
    tied: bool = False
    weighted: bool = False
    """An importance matrix is used."""

    def type_of(self, name: str, shape: tuple[int, ...]) -> str:
        """Return the type of a tensor by its GGUF name."""
        if len(shape) < 2 or "_norm" in name or "ffn_gate_inp" in name or not name.endswith("weight"):
            return "F32"
        if self.kind in PLAIN:
            return self.kind.upper()
        if name == "output.weight" or (self.tied and name == "token_embd.weight"):
            fits = self.kind in RECIPES and not shape[-1] % 256
            return _fallback("Q6_K" if fits else "Q8_0", shape[-1])
        found = RECIPES.get(self.kind, self.kind.upper())
        return _fallback(self._rule(name, found), shape[-1])

    def _rule(self, name: str, found: str) -> str:
        """Apply llama.cpp's rules: more bits for values and for the second half of the feed-forward layers, in the first
        and last eighth of the layers and every third between them."""
        match = re.match(r"blk\.(\d+)\.(\w+)\.", name)
        if match is None:
            return found
        layer, part, eight = int(match[1]), match[2], self.num_experts == 8
        more = _use_more_bits(layer, self.num_layers)
        if part in ("attn_v", "attn_qkv"):
            large = self.num_layers == 80 and self.num_groups > 1
            if self.kind == "q3_k_m":
                found = "Q5_K" if layer < 2 else "Q4_K"
            elif self.kind == "iq4_xs" and self.num_groups >= 4:
                found = "Q5_K"
            elif self.kind in ("q4_k_m", "q5_k_m") and more:
                found = "Q6_K"
            if large and found in ("Q3_K", "Q4_K"):
                found = "Q5_K"
            return "Q8_0" if eight and self.kind in RECIPES else found
        if part == "attn_k" and eight and self.kind in RECIPES:
            return "Q8_0"
        if part.startswith("ffn_down"):
            if self.kind == "q3_k_m":
                return "Q5_K" if layer < self.num_layers // 16 else "Q4_K"
            if self.kind in ("q4_k_m", "q5_k_m") and more:
                return "Q6_K"
            if self.kind == "iq4_xs" and layer < self.num_layers // 8 and not self.weighted:
                return "Q5_K"
        if part == "attn_output":
            if eight and self.kind in ("q3_k_m", "q4_k_m", "iq4_xs"):
                return "Q5_K"
            return "Q4_K" if self.kind == "q3_k_m" else found
        return found


def _use_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _fallback(found: str, width: int) -> str:
    """Return a type whose blocks divide rows of `width` weights."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for each in (found, _FALLBACKS.get(found, "F16"), "F16"):
        if width % GGML_QUANT_SIZES[GGMLQuantizationType[each]][0] == 0:
            return each
    raise AssertionError(found)


def size_of(kind: str, shape: Iterable[int]) -> int:
    """Return the bytes of a tensor."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return math.prod(shape) // block * block_bytes


def encode(
    values: NDArray[np.float32], kind: str, *, name: str, importance: NDArray[np.float32] | None = None
) -> NDArray[Any]:
    """Return a tensor's values in a type; raise a UserError if they are not finite or too large for it."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    largest = float(np.abs(values).max(initial=0.0))  # a NaN stays
    if not math.isfinite(largest):
        raise _cannot(name, kind, "it has NaN or infinite weights", do="use an earlier checkpoint")
    if kind not in _IN_HALF and largest > _LARGEST_HALF:
        why = f"its largest weight is {largest:.3g}, beyond the range of fp16, which {kind.lower()} uses"
        raise _cannot(name, kind, why, do="use --gguf_type bf16")
    chosen = GGMLQuantizationType[kind]
    by_gguf = kind in ("F32", "F16", "BF16") or (importance is None and kind.lower() in BLOCKS)
    if by_gguf:
        return np.ascontiguousarray(quantize(values, chosen))
    row_bytes = size_of(kind, values.shape[-1:])
    if values.ndim == 3:
        weights = importance if importance is not None else [None] * len(values)
        rows = [
            llama_cpp.quantize_rows(each, chosen, row_bytes, weight)
            for each, weight in zip(values, weights, strict=True)
        ]
        return np.stack(rows)
    return llama_cpp.quantize_rows(values, chosen, row_bytes, importance)


def _cannot(name: str, kind: str, why: str, *, do: str) -> UserError:
    return UserError(f"The tensor {name} cannot be written as {kind.lower()}.", why=f"{why}.", do=do)
