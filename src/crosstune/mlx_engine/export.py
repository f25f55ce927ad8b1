"""A Hugging Face folder rewritten for mlx-lm, and the logits of what was written."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.mlx_engine.quant import mlx as limits
from crosstune.models.config_spelling import respell_folder
from crosstune.models.llama_layout import CONFIG

PLAIN_BITS = 16
"""The weights stay as they are."""


def require_mlx() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise UserError(
            "Cannot write a model for MLX.",
            why="the Python package mlx-lm is not installed.",
            do="pip install 'crosstune[mlx]'",
        )


def check_form(*, bits: int, group_size: int) -> None:
    """Raise unless MLX can write it; before anything is merged for it."""
    require_mlx()
    if bits != PLAIN_BITS:
        limits.check_form(bits=bits, group_size=group_size)


def convert_folder(view: Path, target: Path, *, bits: int, group_size: int) -> list[str]:
    """Write what `make_view` has made, quantized unless there are 16 bits. `target` must not exist yet. Returns what
    should be known about the result."""
    from mlx_lm.convert import convert

    warnings = _check_groups(view, group_size) if bits != PLAIN_BITS else []
    try:
        # mlx-lm tells its progress on standard output, which belongs to our own result.
        with contextlib.redirect_stdout(sys.stderr):
            convert(
                str(view),
                str(target),
                quantize=bits != PLAIN_BITS,
                q_bits=bits if bits != PLAIN_BITS else None,
                q_group_size=group_size if bits != PLAIN_BITS else None,
            )
    except ValueError as error:
        raise UserError(f"mlx-lm cannot convert {view}.", why=str(error)) from error
    return warnings


def _check_groups(folder: Path, group_size: int) -> list[str]:
    """mlx-lm passes over layers whose rows a group does not divide: a warning for some, an error for all of them."""
    import mlx.nn as nn

    from crosstune.mlx_engine.load import read_model
    from crosstune.models.folder import read_config

    modules = (module for _, module in read_model(folder, read_config(folder)).named_modules())
    widths = [
        module.weight.shape[-1]
        for module in modules
        if hasattr(module, "to_quantized") and not isinstance(module, nn.Embedding)
    ]
    dense = [width for width in widths if width % group_size]
    if not dense:
        return []
    words = " or ".join(map(str, sorted(set(dense))))
    if len(dense) == len(widths):
        raise UserError(
            f"None of the {len(widths)} linear layers can be quantized in groups of {group_size} weights.",
            why=f"their rows have {words} weights.",
            do=f"use a --group_size among {', '.join(map(str, limits.GROUP_SIZES))} that divides them, or --n_bits 16",
        )
    return [
        f"{len(dense)} of {len(widths)} linear layers stay dense: their rows have {words} weights, "
        f"which groups of {group_size} do not divide"
    ]


def write_plain(source: Path, target: Path, *, dtype: str) -> str:
    """A folder of MLX's quantized weights with every weight dense again, as transformers and mlx-lm read it. Returns the
    word of its number format, which for `auto` is that of the scales."""
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    from crosstune.mlx_engine.load import check_readable, read_model
    from crosstune.mlx_engine.precision import PRECISIONS
    from crosstune.mlx_engine.save_model import save_model
    from crosstune.models.folder import read_config

    config = read_config(source)
    check_readable(source, config)
    model = dequantize_model(read_model(source, config))
    words = {precision.weights: word for word, precision in PRECISIONS.items()}
    if dtype != "auto":
        model.set_dtype(PRECISIONS[dtype].weights)
    mx.eval(model.parameters())
    save_model(target, model, base=source)
    return dtype if dtype != "auto" else words[next(iter(_norms(model))).weight.dtype]


def weights_error(folder: Path, original: Path) -> float:
    """How far the few bits of a folder are from the weights of another, over all of them (relative)."""
    import mlx.core as mx
    import mlx.nn as nn

    from crosstune.mlx_engine.load import read_model
    from crosstune.mlx_engine.quantized import dense_weight
    from crosstune.models.folder import read_config

    plain = dict(read_model(original, read_config(original)).named_modules())
    error = whole = 0.0
    for name, layer in read_model(folder, read_config(folder)).named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)) and name in plain:
            weight = dense_weight(plain[name], mx.float32)
            error += float(mx.square(dense_weight(layer, mx.float32) - weight).sum())
            whole += float(mx.square(weight).sum())
    return (error / whole) ** 0.5 if whole else 0.0


def _norms(model: Any) -> Any:
    """Layers that are never quantized, whose type is that of everything dense."""
    return (module for _, module in model.named_modules() if "Norm" in type(module).__name__)


def make_view(source: Path, view: Path) -> Path:
    """The same files with a config.json that mlx-lm reads rightly."""
    view.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != CONFIG:
            (view / path.name).symlink_to(path.resolve())
    (view / CONFIG).write_bytes((source / CONFIG).read_bytes())
    respell_folder(view)
    return view


def folder_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Logits of a folder as mlx-lm loads it."""
    import mlx.core as mx
    from mlx_lm import load

    model = load(str(folder))[0]
    if mx.default_device() == mx.Device(mx.cpu):
        model = _dense_in_fp32(model)
    found = []
    for prompt in prompts:
        logits = model(mx.array([list(prompt)]))[0].astype(mx.float32)
        found.append(np.array(logits))
    return found


def _dense_in_fp32(model: Any) -> Any:
    """The same weights without bits and halves: MLX's kernels for those take minutes on a CPU."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import dequantize_model

    model = dequantize_model(model)
    model.update(
        tree_map(
            lambda p: p.astype(mx.float32) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()
        )
    )
    return model
