"""Load a model folder onto a torch device tensor by tensor, with quantization and block expansion."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.names import read_expanded_name
from crosstune.core.quantization import QuantSpec
from crosstune.core.weights import principal_factors
from crosstune.estimate.vision import family_of, reads_pictures, vision_family
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.folder import readable_errors
from crosstune.torch_engine.device import Precision, release_freed_memory
from crosstune.torch_engine.import_transformers import import_transformers
from crosstune.torch_engine.loading.adapters import choose_adapted, frozen_vision
from crosstune.torch_engine.loading.blocks import (
    Expansion,
    already_expanded,
    check_passes_through,
    expand_config,
    expand_evenly,
)
from crosstune.torch_engine.loading.file_layout import FileLayout, check_missing, read_layout, shape_error
from crosstune.torch_engine.loading.prequantized import (
    Prequantized,
    check_plain,
    check_requested,
    read_prequantized,
)
from crosstune.torch_engine.loading.stream import Place, find_tensors
from crosstune.torch_engine.loading.weight_forms import WeightForm, outer_forms, weight_forms
from crosstune.torch_engine.quantized import StoredWeight, open_quantizer, quantize_weight
from crosstune.torch_engine.sharding.local_shard import find_blocks
from crosstune.torch_engine.task import Finish


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a model, and how the plan changes it."""

    folder: Path
    plan: Plan
    config: Any
    """The config of the trained model, with its new blocks."""
    expansion: Expansion | None
    prequantized: Prequantized | None

    @property
    def is_plain(self) -> bool:
        """True if the model is neither quantized nor expanded."""
        return self.plan.quant_spec is None and self.expansion is None

    def read_layout(self, model: nn.Module) -> tuple[FileLayout, dict[str, Place], dict[str, WeightForm]]:
        """Return the layout of the files, the places of dense tensors and the forms of quantized tensors; raise unless
        they match the model."""
        places, held = find_tensors(self.folder), dict[str, WeightForm]()
        if self.prequantized is not None:
            places, held = self.prequantized.dense, self.prequantized.forms(model)
        layout = read_layout(model, places, self.expansion, self.folder, held=held.keys())
        return layout, places, held

    def forms_to_quantize(self, model: nn.Module) -> dict[str, WeightForm]:
        """Return the weights to quantize; raise if the quantizer does not support their shapes."""
        spec = self.plan.quant_spec
        if spec is None or self.prequantized is not None:
            return {}
        forms = forms_to_quantize(model, spec, self.expansion)
        check_layer_shapes(spec, forms)
        return forms


def open_source(folder: Path, plan: Plan) -> Source:
    """Read the config of a folder; raise if the plan's method or quantization is incompatible with its weights."""
    config, prequantized = read_config(folder), read_prequantized(folder)
    if prequantized is not None:
        check_requested(prequantized, plan.quant_spec, train_type=plan.config.train_type)
    elif plan.quant_spec is not None or plan.method == "llama_pro":
        check_plain(folder)
    expansion = plan_expansion(plan, folder, config)
    if expansion is not None:
        config = expand_config(config, expansion)
    return Source(folder=folder, plan=plan, config=config, expansion=expansion, prequantized=prequantized)


def load_model(
    folder: Path,
    *,
    plan: Plan,
    precision: Precision,
    device: torch.device,
    finish: Finish | None = None,
) -> tuple[nn.Module, Expansion | None]:
    """Return the model, and its expansion if the method adds blocks.

    `finish` is called with each loaded block and with the rest of the model (see `BuildContext`).
    """
    source = open_source(folder, plan)
    if source.is_plain and finish is None:
        model = read_pretrained(folder, plan=plan, dtype=precision.weights)
        for name in frozen_vision(model, plan):
            model.get_parameter(name).requires_grad_(False)
    else:
        model = _assemble(source, precision, device, finish)
    if precision.buffers is not None:
        _cast_buffers(model, precision.buffers)
    forget_row_lengths(model)
    if finish is None:
        model = model.to(device)
    else:
        finish(model, "")
    expansion = source.expansion
    if expansion is not None and expansion.is_fresh:
        with precision.context(device):
            check_passes_through(model, expansion, device=device)
    return model, expansion


def forget_row_lengths(model: nn.Module) -> None:
    """Compute `dynamic` rotary frequencies from the current rows only. transformers keeps the frequencies of the longest row
    so far, so a resumed run would differ."""

    def start_again(module: Any, _: Any) -> None:
        found = module.original_inv_freq.to(module.inv_freq.device)
        module.register_buffer("inv_freq", found, persistent=False)
        module.max_seq_len_cached = module.original_max_seq_len

    for module in model.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.register_forward_pre_hook(start_again)


def attention_name(plan: Plan, config: Any) -> str | None:
    """Return transformers' name for the plan's attention; None means torch's own where the model supports it."""
    if plan.divides_rows:
        from crosstune.torch_engine.sharding.context import ATTENTION, register_attention

        register_attention()
        return ATTENTION
    chosen, _ = plan.attention
    kind = model_kind(config)._model_mapping.get(type(config), None)
    if chosen == "flash_attn" and getattr(kind, "_supports_flash_attn", False):
        return "flash_attention_2"
    return "eager" if chosen == "eager" else None


def model_kind(config: Any) -> Any:
    """Return transformers' class for language models, or for vision-language models that it does not list there."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    reads_pictures = getattr(config, "vision_config", None) is not None
    if reads_pictures and type(config) not in AutoModelForCausalLM._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def empty_model(folder: Path, config: Any = None, **options: Any) -> nn.Module:
    """Build the model of a folder, or of a config read from it, without weights."""
    config = config if config is not None else read_config(folder)
    with readable_errors(folder), _parameters_without_memory():
        kind = model_kind(config)
        model: nn.Module = kind.from_config(config, trust_remote_code=False, **options)
    return model


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Within the context, new parameters are on the meta device; buffers have their values."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None:
            moved = nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)
            moved.__dict__.update(value.__dict__)
            module._parameters[name] = moved

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def read_config(folder: Path) -> Any:
    """Return the model's config without its quantization_config, since crosstune reads quantized weights itself."""
    import_transformers()
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with readable_errors(folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def read_pretrained(
    folder: Path, *, plan: Plan, dtype: torch.dtype | None = None, device: str | None = None
) -> nn.Module:
    """Load a model with transformers; raise if a tensor is missing from its files or has an unexpected shape.

    On the device "meta" only the headers of the files are read.
    """
    config = read_config(folder)
    with readable_errors(folder):
        model, info = model_kind(config).from_pretrained(
            folder,
            dtype=dtype,
            device_map=device,
            attn_implementation=attention_name(plan, config),
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
        )
    if wrong := sorted(info["mismatched_keys"], key=str):
        raise shape_error(folder, wrong)
    check_missing(folder, sorted(info["missing_keys"]))  # transformers would initialize them randomly
    return model


def _assemble(source: Source, precision: Precision, device: torch.device, finish: Finish | None) -> nn.Module:
    """Build the model without weights, then load and quantize its tensors one by one."""
    plan, spec, expansion = source.plan, source.plan.quant_spec, source.expansion
    attention = attention_name(plan, source.config)
    model = empty_model(source.folder, source.config, dtype=precision.weights, attn_implementation=attention)
    layout, places, held = source.read_layout(model)
    forms = source.forms_to_quantize(model)
    num_workers = 2 if plan.config.loading_workers == -1 else max(1, plan.config.loading_workers)
    compute = precision.autocast or precision.weights
    dtypes = stored_dtypes(model, precision.weights)
    blocks, frozen = LoadingBlocks(model, finish), frozen_vision(model, plan)
    starts = choose_adapted(model, plan) if plan.config.init_lora == "loftq" else ()
    for _, tensors in layout.read(places, num_workers=num_workers):
        while tensors:
            name, tensor = tensors.popitem()
            for target, zeroed in expansion.names(name) if expansion is not None else [(name, False)]:
                values = torch.zeros_like(tensor) if zeroed else tensor
                if expansion is not None and not zeroed:  # a shared tensor would train the source block too
                    values = tensor.clone()
                if spec is not None and target in forms:
                    matrices = forms[target].split(values.to(device))
                    stored = [quantize_weight(m, spec, compute) for m in matrices]
                    if forms[target].matrices[0] in starts:
                        _start_from_error(stored[0], matrices[0], plan)
                    forms[target].put(model, stored)
                    del matrices, stored
                else:
                    trained = target not in frozen and (expansion is None or expansion.is_new(target))
                    _put_dense(model, target, values.to(device, dtypes[target]), trained=trained)
                del values
                blocks.put(target)
            del tensor
        if spec is not None or finish is not None:
            release_freed_memory()
    for _, form in sorted(held.items()):
        assert source.prequantized is not None
        form.put(model, [source.prequantized.stored(matrix, device) for matrix in form.matrices])
        blocks.put(form.parameter)
    model.tie_weights()
    return model


def _start_from_error(stored: StoredWeight, weight: torch.Tensor, plan: Plan) -> None:
    """Compute LoftQ's initial adapter, in one iteration: the best approximation of the quantization error."""
    settings = AdapterSettings.from_config(plan.config, method=plan.method)
    error = (weight.float() - stored.dequantize(torch.float32)).cpu().numpy()
    stored.error_factors = principal_factors(error, rank=settings.rank, scale=settings.scale, start="loftq")


def stored_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype in which transformers loads each tensor of a model in `dtype`: some models keep some in fp32."""
    kept = model._get_dtype_plan(dtype) if hasattr(model, "_get_dtype_plan") else {}
    found = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for pattern, wanted in kept.items():
        search = re.compile(pattern.replace("*", ".*")).search
        found |= {name: wanted for name in found if search(name)}
    return found


def forms_to_quantize(
    model: nn.Module, spec: QuantSpec, expansion: Expansion | None = None
) -> dict[str, WeightForm]:
    """Return the linear layers and experts to quantize: all except new blocks and the layers that the quantizer or the
    specification keeps dense."""
    forms = weight_forms(model)
    kept = outer_forms(model, forms) if getattr(open_quantizer(spec), "KEEPS_OUTER", False) else set()
    family = family_of(model)
    kept |= {name for name in forms if reads_pictures(name, family)}
    names = {name.removesuffix(".weight"): name for name in forms}
    if unknown := [layer for layer in spec.kept if layer not in names]:
        raise UserError(
            f"The base's record lists {len(unknown)} dense layers that this model does not have.",
            why=f"{type(model).__name__} has no linear layer {unknown[0][:200]}.",
            do="use the model of the original run",
        )
    kept |= {names[layer] for layer in spec.kept}
    return {
        name: form
        for name, form in forms.items()
        if name not in kept and not (expansion and expansion.is_new(name))
    }


def check_layer_shapes(spec: QuantSpec, forms: Mapping[str, WeightForm]) -> None:
    """Raise if the quantizer does not support the shape of a layer."""
    quantizer = open_quantizer(spec)
    for name in sorted(forms):
        quantizer.check(spec, forms[name].shape)


class LoadingBlocks:
    """The blocks that are still loading; `finish` is called for each with its last tensor."""

    def __init__(self, model: nn.Module, finish: Finish | None) -> None:
        self.model, self.finish = model, finish
        self._block: dict[str, str] = {}
        for block in find_blocks(model) if finish is not None else ():
            for name in model.get_submodule(block).state_dict():
                self._block[f"{block}.{name}"] = block

    def put(self, name: str) -> None:
        """Record a loaded tensor."""
        block = self._block.pop(name, None)
        if self.finish is not None and block is not None and block not in self._block.values():
            self.finish(self.model, block)


def _put_dense(model: nn.Module, name: str, tensor: torch.Tensor, *, trained: bool) -> None:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    if child in parent._parameters:
        parent._parameters[child] = nn.Parameter(tensor, requires_grad=trained and tensor.is_floating_point())
    else:
        parent._buffers[child] = tensor


def plan_expansion(plan: Plan, folder: Path, config: Any) -> Expansion | None:
    """Return the new blocks of a llama_pro plan; for a folder that has them already, by its name."""
    if plan.method != "llama_pro":
        return None
    if vision_family(config.to_dict()) is not None:
        raise UserError(
            f"--train_type llama_pro does not work with {config.model_type}.",
            why="blocks are added to language models, and this model also reads pictures.",
            do="use --train_type lora, or full",
        )
    named, num_layers = read_expanded_name(folder.name), config.num_hidden_layers
    if named is None and not plan.config.llama_pro_path:
        return expand_evenly(num_layers, plan.config.num_new_blocks)
    if named is None or named[1] != num_layers:
        raise UserError(
            f"The folder name {folder.name} does not specify the new blocks.",
            why=f"it must end in _blk_exp-OLD-{num_layers}, with the number of blocks before and after.",
            do="rename it, or remove --llama_pro_path to add --num_new_blocks blocks to the model",
        )
    return already_expanded(*named)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the buffers of a model, except the scales and tables of quantized weights."""
    for module in model.modules():
        if isinstance(module, StoredWeight):
            continue
        for buffer in module.buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
