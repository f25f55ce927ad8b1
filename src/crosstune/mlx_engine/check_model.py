"""Check that a model folder can be trained as planned, without reading its weights."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.mlx_engine.adapters import choose_targets, saved_parameters, warn_of_left_out
from crosstune.mlx_engine.load import check_quantization, check_readable, check_window, read_model
from crosstune.models.adapter_choice import Layers
from crosstune.models.folder import read_config_json


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Return warnings; raise the errors that loading the model or adding adapters would raise."""
    config = read_config_json(folder)
    check_quantization(folder, check_readable(folder, config), plan)
    check_window(config, plan)
    model = read_model(folder, config)
    if plan.method in ADAPTER_METHODS:
        layers = Layers.from_config(plan.config)
        targets, quantized = plan.config.lora_target_modules, plan.quantizer != "none"
        chosen = choose_targets(model, targets, layers=layers)
        saved_parameters(model, plan.config, adapted=chosen)
        return warn_of_left_out(model, targets, quantized=quantized, layers=layers)
    return []
