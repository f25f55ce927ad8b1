"""Read, merge, convert and quantize model folders with mlx-lm: core.model_folders.ModelFolders for MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.convert import convert
from mlx_lm.utils import dequantize_model
from numpy.typing import NDArray

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.model_folders import (
    PLAIN_BITS,
    DenseWeights,
    ModelFolders,
    OnBytes,
    Rewrite,
    WeightForm,
    Written,
)
from crosstune.mlx_engine.expert_adapters import Adapter, ExpertAdapter
from crosstune.mlx_engine.load import (
    DTYPES,
    check_readable,
    check_type,
    ignored_window,
    read_model,
    readable_errors,
    stored_shapes,
)
from crosstune.mlx_engine.quant import mlx as quant_limits
from crosstune.mlx_engine.quantized import dense_weight
from crosstune.mlx_engine.save_model import save_arrays, save_model
from crosstune.mlx_engine.wrap_call import wrap_call
from crosstune.models.adapter_files import copy_tokenizer
from crosstune.models.folder import add_folder_aliases, read_config_json, weight_files
from crosstune.models.llama_layout import CONFIG
from crosstune.models.quantized_folder import read_quantization
from crosstune.process.this_process import hide_output

_SPARE_BYTES = 50_000_000


def open_folders(plan: Plan | None = None) -> ModelFolders:
    """Return the operations. `plan` is not used: MLX has one device, and mlx-lm keeps the stored precision."""
    return MlxFolders()


class MlxFolders:
    """The operations on model folders."""

    reader = "mlx-lm"
    own_quantizer: str | None = "mlx"
    reads_gguf = False
    folds_sessions = True

    def check_adapter(self, weights: DenseWeights) -> None:
        """Do nothing: the session checked its adapter when it was opened."""

    def check_form(self, form: WeightForm) -> None:
        assert form.quantizer in ("none", "mlx"), form.quantizer
        if form.quantizer == "mlx" and form.bits != PLAIN_BITS:
            quant_limits.check_form(bits=form.bits, group_size=form.group_size)

    def logits(self, folder: Path, prompts: Prompts, *, gguf: str | None = None) -> Logits:
        assert gguf is None, "mlx-lm does not read GGUF files"
        model = _load(folder)
        with readable_errors(folder):
            return [np.array(model(mx.array([list(prompt)]))[0].astype(mx.float32)) for prompt in prompts]

    def ignored_window(self, folder: Path) -> int | None:
        config = read_config_json(folder)
        check_type(folder, config)  # quantized weights may be converted first
        return ignored_window(config)

    def input_squares(
        self, folder: Path, rows: Prompts, *, show: Callable[[int, int], None]
    ) -> dict[str, NDArray[np.float32]]:
        model, sums = _load(folder), dict[str, mx.array]()

        def watch(name: str) -> Callable[..., Any]:
            def add(call: Callable[..., Any], module: nn.Module, inputs: mx.array) -> Any:
                squares = mx.square(inputs.astype(mx.float32)).reshape(-1, inputs.shape[-1]).sum(0)
                sums[name] = sums[name] + squares if name in sums else squares
                return call(inputs)

            return add

        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                wrap_call(module, watch(name))
        for done, row in enumerate(rows, start=1):
            mx.eval(model(mx.array([list(row)])), sums)
            show(done, len(rows))
        count = sum(map(len, rows))
        return {name: np.array(total / count) for name, total in sums.items()}

    def variant_logits(
        self, folder: Path, prompts: Prompts, variants: Mapping[str, DenseWeights]
    ) -> tuple[Logits, dict[str, Logits]]:
        """Return the logits of the folder only: mlx-lm cannot load weights merged by a session."""
        return self.logits(folder, prompts), {}

    def weight_errors(self, folder: Path, original: Path) -> Mapping[str, Any]:
        """Return the relative error over all quantized weights of a folder."""
        plain = dict(read_model(original, read_config_json(original)).named_modules())
        error = total = 0.0
        for name, layer in read_model(folder, read_config_json(folder)).named_modules():
            if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)) and name in plain:
                weight = dense_weight(plain[name], mx.float32)
                error += float(mx.square(dense_weight(layer, mx.float32) - weight).sum())
                total += float(mx.square(weight).sum())
        return {"relative": (error / total) ** 0.5 if total else 0.0}

    def write_dense(
        self, target: Path, weights: DenseWeights, *, session: Any = None, on_bytes: OnBytes | None = None
    ) -> None:
        """Write dense weights, with the session's adapters merged; quantized weights keep their values in training."""
        if weights.adapter is None:
            write_plain(weights.folder, target, dtype=weights.dtype)
            return
        modules = {
            name.removesuffix(".base"): module
            for name, module in session.model.named_modules()
            if weights.quantization is not None and "scales" in module
        }
        dtype = None if weights.dtype == "auto" else DTYPES[weights.dtype]
        trained = dict(tree_flatten(session.model.trainable_parameters()))
        saved = {name: array for name, array in trained.items() if ".lora_" not in name}
        arrays = dense_arrays(
            weights.folder, adapters=session.adapters, saved=saved, modules=modules, dtype=dtype
        )
        layers = {name for name, each in session.adapters.items() if not isinstance(each, ExpertAdapter)}
        missing = [layer for layer in {*modules, *layers} if f"{layer}.weight" not in arrays]
        if missing:
            raise UserError(
                f"{weights.folder} cannot be merged by MLX.",
                why=f"mlx-lm renames {len(missing)} of its layers, such as {missing[0]}.",
                do="merge it on a machine with torch, or use mlx_lm.fuse",
            )
        save_arrays(target, arrays, base=weights.folder, on_write=on_bytes)

    def result_bytes(self, rewrite: Rewrite) -> int:
        num_bytes = sum(path.stat().st_size for path in weight_files(rewrite.source))
        growth = 2 if read_quantization(rewrite.source) is None else 8  # from 16 or from 4 bits to 32
        return growth * num_bytes + _SPARE_BYTES

    def rewrite_folder(
        self, target: Path, rewrite: Rewrite, *, scratch: Path, on_bytes: OnBytes | None = None
    ) -> Written:
        warnings: list[str] = []
        if rewrite.form.quantizer == "none":
            write_plain(rewrite.source, target, dtype=rewrite.form.dtype)
        else:
            warnings = self._write_mlx(target, rewrite, scratch)
        if rewrite.tokenizer != rewrite.source:
            copy_tokenizer(rewrite.tokenizer, target)
        return Written(warnings=warnings)

    def readable(self, folder: Path, *, view: Path) -> Path:
        return make_view(folder, view)

    def _write_mlx(self, target: Path, rewrite: Rewrite, scratch: Path) -> list[str]:
        """Write the folder with mlx-lm, which quantizes only dense weights."""
        source, form = rewrite.source, rewrite.form
        if read_quantization(source) is not None:
            source = scratch / "plain"
            write_plain(rewrite.source, source, dtype="auto")
        view = make_view(source, scratch / "respelled")
        quantizes = form.bits != PLAIN_BITS
        options = {"q_bits": form.bits, "q_group_size": form.group_size} if quantizes else {}
        warnings = _check_groups(view, form.group_size) if quantizes else []
        with readable_errors(view), hide_output():
            convert(str(view), str(target), quantize=quantizes, **options)
        return warnings


def _load(folder: Path) -> Any:
    model: Any = load(str(folder))[0]
    if mx.default_device() == mx.Device(mx.cpu):  # its kernels need minutes for other formats
        model = dequantize_model(model)
        model.set_dtype(mx.float32)
    return model


def _check_groups(folder: Path, group_size: int) -> list[str]:
    """Return a warning about layers whose rows the group size does not divide; raise if these are all layers."""
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
            do=f"use a --group_size among {', '.join(map(str, quant_limits.GROUP_SIZES))} that divides them, or --n_bits 16",
        )
    return [
        f"{len(dense)} of {len(widths)} linear layers stay dense: their rows have {row_sizes} weights, "
        f"which groups of {group_size} do not divide"
    ]


def write_plain(source: Path, target: Path, *, dtype: str) -> None:
    """Write a folder with dense weights; with dtype `auto`, dequantized weights have the dtype of their scales."""
    config = read_config_json(source)
    check_readable(source, config)
    model = dequantize_model(read_model(source, config))
    if dtype != "auto":
        model.set_dtype(DTYPES[dtype])
    mx.eval(model.parameters())
    save_model(target, model, base=source)


def dense_arrays(
    folder: Path,
    *,
    adapters: Mapping[str, Adapter],
    saved: Mapping[str, mx.array],
    modules: Mapping[str, Any],
    dtype: mx.Dtype | None,
) -> dict[str, mx.array]:
    """Return the arrays of a folder with adapters merged, unevaluated; without `dtype` they keep theirs."""
    experts = _expert_changes(folder, adapters)
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
            elif name in experts:
                array = array.astype(mx.float32) + experts[name]()
            array = saved.get(name, array)
            floating = mx.issubdtype(array.dtype, mx.floating)
            found[name] = array.astype(dtype or kept) if floating else array
    return found


def _expert_changes(folder: Path, adapters: Mapping[str, Adapter]) -> dict[str, Callable[[], mx.array]]:
    """Return functions for what adapters of experts add to the tensors of a folder."""
    shapes = stored_shapes(folder)
    found: dict[str, Callable[[], mx.array]] = {}
    for name, adapter in adapters.items():
        if isinstance(adapter, ExpertAdapter):
            weights = adapter.weights_in(name, shapes)
            if not weights:
                raise UserError(
                    f"{folder} cannot be merged by MLX.",
                    why=f"it has no tensor for the experts of {name}, or they are quantized.",
                    do="merge it on a machine with torch",
                )
            found |= {each: partial(adapter.change, weight) for each, weight in weights.items()}
    return found


def make_view(source: Path, view: Path) -> Path:
    """Make a folder of symlinks to the same files, with a config.json that mlx-lm reads correctly."""
    view.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.name != CONFIG:
            (view / path.name).symlink_to(path.resolve())
    (view / CONFIG).write_bytes((source / CONFIG).read_bytes())
    add_folder_aliases(view)
    return view
