"""Read the dtype of a model folder's weights, and their dense size, from the headers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from crosstune.core.safetensors_header import read_header
from crosstune.models.folder import weight_files
from crosstune.models.quantized_folder import dense_shapes, read_quantization

_STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_COMPUTED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SPARE_BYTES = 50_000_000
"""For the tokenizer and other small files."""


def stored_format(folder: Path) -> str:
    """Return the number format of most weights in a folder; a quantized weight counts with its compute dtype."""
    quantized = read_quantization(folder)
    counts = Counter(
        _STORED[entry["dtype"]] for entry in _dense_entries(folder).values() if entry["dtype"] in _STORED
    )
    if quantized is not None and quantized.dtype in _COMPUTED:
        counts[_COMPUTED[quantized.dtype]] += len(quantized.layers)
    return max(sorted(counts), key=lambda name: counts[name], default="fp32")


def dense_bytes(folder: Path, dtype: str = "auto") -> int:
    """Return the disk space of a plain folder of the weights, in `dtype` or in their stored format."""
    quantized = read_quantization(folder)
    entries = _dense_entries(folder)
    counts = {name: math.prod(entry["shape"]) for name, entry in entries.items()}
    if dtype in _ITEM_BYTES:
        total = sum(counts.values()) * _ITEM_BYTES[dtype]
    else:
        total = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
    if quantized is not None:
        item_bytes = _ITEM_BYTES.get(dtype) or _ITEM_BYTES.get(_COMPUTED.get(quantized.dtype, ""), 4)
        total += item_bytes * sum(math.prod(facts["shape"]) for facts in quantized.layers.values())
    return total + _SPARE_BYTES


def _dense_entries(folder: Path) -> dict[str, Any]:
    """Return the header entries of the tensors that are not part of a quantized weight."""
    entries = {name: entry for path in weight_files(folder) for name, entry in read_header(path)[0].items()}
    shapes, quantized = dense_shapes(folder), read_quantization(folder)
    if shapes is None or quantized is None:
        return entries
    packed = {f"{layer}.weight" for layer in quantized.layers}
    return {name: entry for name, entry in entries.items() if name in shapes and name not in packed}
