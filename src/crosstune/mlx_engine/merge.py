"""Merge the adapters of an MLX session into the base weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.core.errors import UserError
from crosstune.core.model_folders import OnBytes
from crosstune.mlx_engine.adapters import AdaptedLinear
from crosstune.mlx_engine.load import DTYPES
from crosstune.mlx_engine.quantized import dense_weight
from crosstune.mlx_engine.save_model import save_arrays
from crosstune.mlx_engine.session import MlxSession
from crosstune.models.folder import weight_files


def write_merged(
    target: Path,
    source: Path,
    session: MlxSession,
    *,
    dequantized: bool,
    dtype: str,
    on_write: OnBytes | None,
) -> None:
    """Write `source` with dense weights and the session's adapters merged.

    With `dequantized`, quantized weights keep the values used in training. With `auto`, dtypes do not change.
    """
    modules = {
        name.removesuffix(".base"): module
        for name, module in session.model.named_modules()
        if dequantized and isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    }
    target_dtype = None if dtype == "auto" else DTYPES[dtype]
    arrays = _dense(source, adapters=session.adapters, modules=modules, dtype=target_dtype)
    missing = [layer for layer in {*modules, *session.adapters} if f"{layer}.weight" not in arrays]
    if missing:
        raise UserError(
            f"{source} cannot be merged by MLX.",
            why=f"mlx-lm renames {len(missing)} of its layers, such as {missing[0]}.",
            do="merge it on a machine with torch, or use mlx_lm.fuse",
        )
    save_arrays(target, arrays, base=source, on_write=on_write)


def _dense(
    folder: Path, *, adapters: Mapping[str, AdaptedLinear], modules: Mapping[str, Any], dtype: mx.Dtype | None
) -> dict[str, mx.array]:
    """Return the arrays to write, unevaluated."""
    found: dict[str, mx.array] = {}
    for path in weight_files(folder):
        arrays: Any = mx.load(str(path))
        for name, array in arrays.items():
            layer, _, part = name.rpartition(".")
            module, kept = modules.get(layer), array.dtype
            if module is not None and part in ("scales", "biases"):
                continue
            if module is not None and part == "weight":
                kept = kept if mx.issubdtype(kept, mx.floating) else module.scales.dtype
                array = dense_weight(module, mx.float32)
            if layer in adapters and part == "weight":
                array = adapters[layer].fold(array)
            floating = mx.issubdtype(array.dtype, mx.floating)
            found[name] = array.astype(dtype or kept) if floating else array
    return found
