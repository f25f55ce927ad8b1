"""Check that a model folder can be trained as planned, from its config and the names of its tensors alone."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.plan import Plan
from crosstune.torch_engine.adapters import choose_targets, warn_of_left_out
from crosstune.torch_engine.blocks import expand_config
from crosstune.torch_engine.kernels.choose import warn_of_general
from crosstune.torch_engine.load import (
    check_layer_shapes,
    check_shapes,
    empty_model,
    forms_to_quantize,
    plan_expansion,
    read_config,
    read_layout,
    read_pretrained,
)
from crosstune.torch_engine.prequantized import check_asked, check_plain, read_prequantized
from crosstune.torch_engine.rope_lengths import warn_of_rope
from crosstune.torch_engine.stream import find_tensors


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Raise the errors that loading the model or adding adapters would raise, without reading any weights. Return
    warnings."""
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
        model = empty_model(folder, config)
        places = find_tensors(folder) if prequantized is None else prequantized.dense
        held = prequantized.forms(model).keys() if prequantized is not None else set()
        read_layout(model, places, expansion, folder, held=held)
        check_shapes(model, places, expansion, folder)
    if spec is not None and prequantized is None:
        check_layer_shapes(spec, forms_to_quantize(model, spec, expansion))
    if plan.method in ADAPTER_METHODS:
        last_layers = read_mlx_settings(plan.config.mlx_config).num_layers
        targets = plan.config.lora_target_modules
        dora = plan.method == "dora"
        choose_targets(model, targets, dora=dora, last_layers=last_layers)
        left_out = warn_of_left_out(model, targets, dora=dora, last_layers=last_layers)
        return [*left_out, *warn_of_general(model, plan=plan), *warn_of_rope(config, plan=plan)]
    return warn_of_rope(config, plan=plan)
