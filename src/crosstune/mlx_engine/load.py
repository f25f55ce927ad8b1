"""Load a model folder with mlx-lm, quantize it if planned, and check that it can be trained."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import LIBRARY_FAULTS, UserError
from crosstune.core.out_of_memory import is_out_of_memory
from crosstune.files.safetensors_header import read_header
from crosstune.mlx_engine.adapters import linear_layers
from crosstune.mlx_engine.expert_adapters import ExpertAdapter
from crosstune.mlx_engine.quant.mlx import check_form
from crosstune.mlx_engine.quantized import dense_weight, linear_shape, quantize_layers
from crosstune.models.folder import add_config_aliases, read_config_json, weight_files
from crosstune.models.quantized_folder import FolderQuantization, read_quantization
from crosstune.models.weights import read_rows

DTYPES = {"fp32": mx.float32, "bf16": mx.bfloat16, "fp16": mx.float16}
"""Precision -> dtype of the weights in memory. Trained weights also have fp32 masters."""
READ_BY_MLX_LM = ("bitnet", "mxfp4", "mxfp8", "fp8", "compressed-tensors", "modelopt", "awq", "gptq")
"""Foreign quantizations that mlx-lm converts to its own on load."""
_ROPES = {"dynamic": "DynamicNTKScalingRoPE", "yarn": "YarnRoPE", "llama3": "Llama3RoPE"}
"""Value of --rope_scaling -> mlx-lm's class."""
_ROWS_COMPARED = 8
_QUANTIZATION_ERROR = {2: 0.25, 3: 0.1}
"""Bits -> largest relative change of a weight's squared norm by quantization; below 0.05 with more bits."""


def load_model(folder: Path, *, plan: Plan, dtype: mx.Dtype, trained: bool = True) -> nn.Module:
    """Return the model with dense weights in `dtype`, and linear layers quantized as planned."""
    config = read_config_json(folder)
    quantized = check_readable(folder, config)
    if trained or plan.method != "full":
        check_quantization(folder, quantized, plan)
    check_window(config, plan)
    model = read_model(folder, config)
    check_rope(model, plan)
    if plan.quantizer != "none" and quantized is None:
        layers = linear_layers(model)
        quantize_layers(model, layers, bits=plan.n_bits, group_size=plan.config.group_size)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def read_model(folder: Path, config: Mapping[str, Any], *, strict: bool = True) -> nn.Module:
    """Return the model as stored, with lazily loaded weights. Not `strict`: ignore missing and unknown weights."""
    from mlx_lm.utils import load_model as load

    with readable_errors(folder):
        return load(folder, lazy=True, strict=strict, model_config=add_config_aliases(dict(config)))[0]


def check_readable(folder: Path, config: Mapping[str, Any]) -> FolderQuantization | None:
    """Return how the weights are quantized; raise if mlx-lm cannot read the folder without running its code."""
    check_type(folder, config)
    quantized, other = read_quantization(folder), config.get("quantization_config")
    if quantized is not None and not quantized.own and quantized.spec.quantizer in READ_BY_MLX_LM:
        quantized = None
    if quantized is not None:
        name = quantized.spec.quantizer
    else:
        name = str(other.get("quant_method")) if isinstance(other, dict) else "mlx"
    if name != "mlx" and (quantized is not None or name not in READ_BY_MLX_LM):
        raise UserError(
            f"{folder} contains weights quantized by {name}, which MLX cannot read.",
            why="each library packs weights in its own format.",
            do="use the original weights (--train_type qlora quantizes them on load), or "
            f"dequantize them on a machine with torch: crosstune convert {shlex.quote(str(folder))} --to none",
        )
    return quantized


def check_rope(model: nn.Module, plan: Plan) -> None:
    """Raise if mlx-lm ignores the positions of --rope_scaling in this model."""
    kind, factor = plan.config.rope_scaling, plan.config.rope_factor
    if kind == "none" or factor is None:
        return
    for _, module in model.named_modules():
        linear = isinstance(module, nn.RoPE) and module.scale * factor == 1
        if linear if kind == "linear" else type(module).__name__ == _ROPES[kind]:
            return
    raise UserError(
        f"--rope_scaling {kind} does not work with this model on MLX.",
        why="mlx-lm ignores it.",
        do="use a torch backend, or remove --rope_scaling and --rope_factor",
    )


def check_type(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise if mlx-lm does not support the model type, or would run the model's code."""
    code = [key for key in ("model_file", "auto_map") if config.get(key)]
    if code:
        raise UserError(
            f"The model in {folder} needs to run its own code.",
            why=f"its config.json refers to code under {' and '.join(code)}, which crosstune does not run.",
            do="use a version of the model that transformers or mlx-lm support",
        )
    kind = str(config.get("model_type", ""))
    if not knows_type(config):
        raise UserError(
            f"MLX cannot run a '{kind}' model.",
            why="the installed mlx-lm does not support it.",
            do="use a torch backend (--backend auto chooses one unless MLX is requested), or a newer mlx-lm",
        )


def knows_type(config: Mapping[str, Any]) -> bool:
    """True if mlx-lm supports the model type."""
    name = _module_name(config)
    if not name or "." in name or importlib.util.find_spec(f"mlx_lm.models.{name}") is None:
        return False
    return hasattr(importlib.import_module(f"mlx_lm.models.{name}"), "Model")


def _module_name(config: Mapping[str, Any]) -> str:
    """Return mlx-lm's module for a model type; several types may share one."""
    from mlx_lm import utils

    kind = str(config.get("model_type", ""))
    architectures = config.get("architectures") or ()
    remapped = getattr(utils, "MODEL_ARCHITECTURE_REMAPPING", {})
    names = [remapped[(kind, name)] for name in architectures if (kind, name) in remapped]
    return str(names[0] if names else utils.MODEL_REMAPPING.get(kind, kind))


def check_quantization(folder: Path, quantized: FolderQuantization | None, plan: Plan) -> None:
    """Raise if the requested quantization differs from the folder's: nothing is quantized twice."""
    if quantized is None:
        if plan.quantizer != "none":
            check_form(bits=plan.n_bits, group_size=plan.config.group_size)
        return
    bits, group_size = quantized.spec.bits, quantized.spec.group_size
    flags = f"--train_type qlora --n_bits {bits} --group_size {group_size}"
    if plan.method not in ("lora", "dora"):
        raise UserError(
            f"{folder} contains MLX weights of {bits} bits, which {plan.method} cannot train.",
            why="quantized weights cannot be updated.",
            do=f"use {flags}, or get plain weights: crosstune convert {shlex.quote(str(folder))} --to hf",
        )
    if plan.quantizer != "mlx" or (plan.n_bits, plan.config.group_size) != (bits, group_size):
        requested = "a base that is not quantized" if plan.quantizer == "none" else f"{plan.n_bits} bits"
        raise UserError(
            f"{folder} contains weights quantized differently than requested ({requested}).",
            why=f"they have {bits} bits, in groups of {group_size}.",
            do=f"use {flags}, or crosstune convert the folder",
        )


def check_stored(folder: Path, trained: Mapping[str, Any], *, kind: str) -> None:
    """Raise unless every trained or adapted weight equals the tensor of the same name in the folder's files.

    mlx-lm renames, stacks, transposes or scales the weights of some models on load; other tools would misread a result
    trained on those. `trained` maps names to arrays, or to layers with adapters. A few rows of each are compared.
    """
    places = _places(folder)
    changed = [name for name, what in trained.items() if not _is_stored(name, what, places)]
    if changed:
        raise UserError(
            f"MLX cannot train a '{kind}' model in this way.",
            why=f"mlx-lm stores {len(changed)} of its weights differently from its files, such as {changed[0]}.",
            do="use a torch backend, or adapters on other layers (--lora_target_modules)",
        )


_Places = Mapping[str, tuple[Path, Mapping[str, Any]]]


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the files of a model folder."""
    return {name: entry["shape"] for name, (_, entry) in _places(folder).items()}


def _places(folder: Path) -> _Places:
    return {
        name: (path, entry) for path in weight_files(folder) for name, entry in read_header(path)[0].items()
    }


def _is_stored(name: str, what: Any, places: _Places) -> bool:
    if isinstance(what, ExpertAdapter):
        return _are_stored(name, what, places)
    array = what if isinstance(what, mx.array) else what.weight
    if name not in places:
        return False
    path, entry = places[name]
    if not entry["shape"]:
        return bool(array.size == 1)
    same_shape = list(array.shape if isinstance(what, mx.array) else linear_shape(what)) == entry["shape"]
    rows = np.unique(np.linspace(0, entry["shape"][0] - 1, _ROWS_COMPARED).astype(np.int64))
    stored = read_rows(path, name, rows)
    if stored.dtype.kind != "f":  # packed bits, which MLX loads unchanged
        return list(array.shape) == entry["shape"] and bool((np.array(array[mx.array(rows)]) == stored).all())
    if not same_shape:
        return False
    if isinstance(what, mx.array):
        found = array[mx.array(rows)].astype(mx.float32)
    else:
        found = dense_weight(what, mx.float32, mx.array(rows))
    return _agree(found, stored, what)


def _are_stored(name: str, adapter: ExpertAdapter, places: _Places) -> bool:
    """Compare the first and the last expert with the files. gpt-oss' packed experts are not compared."""
    if f"{name}_blocks" in places:
        return True
    weights = adapter.weights_in(name, {each: entry["shape"] for each, (_, entry) in places.items()})
    experts = np.array([0, adapter.num_experts - 1])
    for stored_name, weight in weights.items():
        path, entry = places[stored_name]
        if weight.expert is not None and weight.expert not in experts:
            continue
        chosen = experts if weight.expert is None else experts[experts == weight.expert][:1]
        rows = experts if weight.expert is None else np.arange(entry["shape"][0])
        stored = read_rows(path, stored_name, rows)
        if stored.dtype.kind != "f":  # packed bits
            continue
        stored = stored.swapaxes(-1, -2) if weight.transposed else stored
        for part, layer in adapter.layers.items():
            if weight.path not in (None, part):
                continue
            found = dense_weight(layer, mx.float32, mx.array(chosen)).reshape(-1, stored.shape[-1])
            expected = stored[:, adapter.rows_of(part)] if weight.path is None else stored
            if not _agree(found, expected.reshape(found.shape), layer):
                return False
    return bool(weights)


def _agree(found: mx.array, stored: np.ndarray, layer: Any) -> bool:
    """Compare weights with those in a file, up to the quantization error of the layer."""
    values, size = np.array(found), float((stored * stored).sum())
    if isinstance(layer, nn.Module) and "scales" in layer:
        error = _QUANTIZATION_ERROR.get(layer.bits, 0.05)
        return abs(float((values * stored).sum()) - size) <= error * size
    return bool(np.allclose(values, stored, rtol=1e-2, atol=1e-2 * float(np.abs(stored).max(initial=0.0))))


def num_parameters(model: nn.Module) -> int:
    """Return the number of weights, counting quantized weights at their unquantized shape."""
    arrays = tree_flatten(model.parameters())
    total = sum(array.size for name, array in arrays if not name.endswith((".scales", ".biases")))
    for _, module in model.named_modules():
        if "scales" in module:
            total += module.weight.size * 32 // module.bits - module.weight.size
    return total


def ignored_window(config: Mapping[str, Any]) -> int | None:
    """Return the model's sliding window if mlx-lm does not apply it: beyond it, mlx-lm and transformers differ."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return None
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return None
    module = importlib.import_module(f"mlx_lm.models.{_module_name(config)}")
    has_window = "sliding_window" in inspect.signature(module.ModelArgs).parameters
    return window if not has_window or (_module_name(config) == "llama" and not kinds) else None


def check_window(config: Mapping[str, Any], plan: Plan) -> None:
    """Raise if rows may exceed the model's sliding window and mlx-lm does not apply it."""
    window = ignored_window(config)
    if window is not None and plan.config.context_length > window:
        raise UserError(
            f"--context_length {plan.config.context_length} is too long for a {config.get('model_type')} model on MLX.",
            why=f"it has a sliding window of {window} tokens, which mlx-lm does not apply.",
            do=f"use --context_length {window}, or a torch backend",
        )


@contextlib.contextmanager
def readable_errors(folder: Path) -> Iterator[None]:
    """Convert mlx-lm's errors to a UserError that specifies the folder."""
    try:
        yield
    except LIBRARY_FAULTS as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"mlx-lm cannot load the model in {folder}.",
            why=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            do="check that it is a causal language model and that its files are complete",
        ) from error
