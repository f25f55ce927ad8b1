"""Check that a model folder can be trained as planned, from its config and the names of its tensors alone."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.plan import Plan
from crosstune.torch_engine.adapters import choose_targets
from crosstune.torch_engine.blocks import expand_config
from crosstune.torch_engine.load import (
    check_layer_shapes,
    check_names,
    check_shapes,
    layers_to_quantize,
    plan_expansion,
    read_config,
    read_pretrained,
    readable_errors,
)
from crosstune.torch_engine.prequantized import check_asked, check_plain, read_prequantized
from crosstune.torch_engine.stream import find_tensors


def check_model(folder: Path, *, plan: Plan) -> None:
    """Raise the errors that loading the model or adding adapters would raise, without reading any weights."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config, spec, prequantized = read_config(folder), plan.quant_spec, read_prequantized(folder)
    if prequantized is not None:
        check_asked(prequantized, spec, train_type=plan.config.train_type)
    elif spec is not None or plan.method == "llama_pro":
        check_plain(folder)
    expansion = plan_expansion(plan, folder, config)
    if expansion is not None:
        config = expand_config(config, expansion)
    if spec is None and expansion is None:
        model = read_pretrained(folder, plan=plan, device="meta")
    else:
        with readable_errors(folder), init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if spec is not None or expansion is not None:
        places = find_tensors(folder) if prequantized is None else prequantized.dense
        stored = {f"{layer}.weight" for layer in prequantized.layers} if prequantized is not None else set()
        check_names(model, places.keys() | stored, expansion, folder)
        check_shapes(model, places, expansion, folder)
    if spec is not None and prequantized is None:
        check_layer_shapes(model, spec, layers_to_quantize(model, expansion))
    if plan.method in ADAPTER_METHODS:
        last_layers = read_mlx_settings(plan.config.mlx_config).num_layers
        choose_targets(model, plan.config.lora_target_modules, last_layers=last_layers)
