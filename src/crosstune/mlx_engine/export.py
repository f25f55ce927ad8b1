"""Rewrite model folders with mlx-lm, dense or quantized, and compute their logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.convert import convert
from mlx_lm.utils import dequantize_model

from crosstune.core.errors import LIBRARY_FAULTS, UserError
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.model_folders import PLAIN_BITS
from crosstune.core.out_of_memory import is_out_of_memory
from crosstune.mlx_engine.load import PRECISIONS, check_readable, read_model
from crosstune.mlx_engine.quant import mlx as limits
from crosstune.mlx_engine.quantized import dense_weight
from crosstune.mlx_engine.save_model import save_model
from crosstune.models.config_spelling import respell_folder
from crosstune.models.folder import read_config_json
from crosstune.models.llama_layout import CONFIG
from crosstune.process.this_process import hide_output


def convert_folder(view: Path, target: Path, *, bits: int, group_size: int) -> list[str]:
    """Convert a folder from `make_view` to MLX's format, quantized unless `bits` is 16, and return warnings.
    `target` must not exist yet."""
    warnings = _check_groups(view, group_size) if bits != PLAIN_BITS else []
    try:
        with hide_output():
            convert(
                str(view),
                str(target),
                quantize=bits != PLAIN_BITS,
                q_bits=bits if bits != PLAIN_BITS else None,
                q_group_size=group_size if bits != PLAIN_BITS else None,
            )
    except LIBRARY_FAULTS as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"mlx-lm cannot convert {view}.", why=f"{type(error).__name__}: {str(error)[:400]}"
        ) from error
    return warnings


def _check_groups(folder: Path, group_size: int) -> list[str]:
    """Warn about layers left dense because the group size does not divide their rows; raise if that holds for all."""
    modules = (module for _, module in read_model(folder, read_config_json(folder)).named_modules())
    widths = [
        module.weight.shape[-1]
        for module in modules
        if hasattr(module, "to_quantized") and not isinstance(module, nn.Embedding)
    ]
    dense = [width for width in widths if width % group_size]
    if not dense:
        return []
    row_sizes = " or ".join(map(str, sorted(set(dense))))
    if len(dense) == len(widths):
        raise UserError(
            f"None of the {len(widths)} linear layers can be quantized in groups of {group_size} weights.",
            why=f"their rows have {row_sizes} weights.",
            do=f"use a --group_size among {', '.join(map(str, limits.GROUP_SIZES))} that divides them, or --n_bits 16",
        )
    return [
        f"{len(dense)} of {len(widths)} linear layers stay dense: their rows have {row_sizes} weights, "
        f"which groups of {group_size} do not divide"
    ]


def write_plain(source: Path, target: Path, *, dtype: str) -> None:
    """Write a folder with dense weights for transformers and mlx-lm. With dtype `auto`, a dequantized weight gets the
    dtype of its scales."""
    config = read_config_json(source)
    check_readable(source, config)
    model = dequantize_model(read_model(source, config))
    if dtype != "auto":
        model.set_dtype(PRECISIONS[dtype].weights)
    mx.eval(model.parameters())
    save_model(target, model, base=source)


def weights_error(folder: Path, original: Path) -> float:
    """Return the relative error over all quantized weights of a folder."""
    plain = dict(read_model(original, read_config_json(original)).named_modules())
    error = total = 0.0
    for name, layer in read_model(folder, read_config_json(folder)).named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)) and name in plain:
            weight = dense_weight(plain[name], mx.float32)
            error += float(mx.square(dense_weight(layer, mx.float32) - weight).sum())
            total += float(mx.square(weight).sum())
    return (error / total) ** 0.5 if total else 0.0


def make_view(source: Path, view: Path) -> Path:
    """Make a folder of symlinks to the same files, with a config.json that mlx-lm reads correctly."""
    view.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != CONFIG:
            (view / path.name).symlink_to(path.resolve())
    (view / CONFIG).write_bytes((source / CONFIG).read_bytes())
    respell_folder(view)
    return view


def mlx_lm_logits(folder: Path, prompts: Prompts) -> Logits:
    """Return the logits of a folder loaded by mlx-lm."""
    model = load(str(folder))[0]
    if mx.default_device() == mx.Device(mx.cpu):
        model = _dense_in_fp32(model)
    found = []
    for prompt in prompts:
        logits = model(mx.array([list(prompt)]))[0].astype(mx.float32)
        found.append(np.array(logits))
    return found


def _dense_in_fp32(model: Any) -> Any:
    """Return the model with dense fp32 weights: MLX's CPU kernels for other formats take minutes."""
    model = dequantize_model(model)
    model.update(
        tree_map(
            lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()
        )
    )
    return model
