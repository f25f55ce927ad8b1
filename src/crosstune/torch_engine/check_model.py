"""Check that a model folder can be trained as planned, from its config and the names of its tensors alone."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.plan import Plan
from crosstune.torch_engine.adapters import choose_targets, warn_of_left_out
from crosstune.torch_engine.kernels.choose import warn_of_general
from crosstune.torch_engine.load import empty_model, open_source, read_pretrained
from crosstune.torch_engine.rope_lengths import warn_of_rope


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Raise the errors that loading the model or adding adapters would raise, without reading any weights. Return
    warnings."""
    source = open_source(folder, plan)
    if source.is_plain:
        model = read_pretrained(folder, plan=plan, device="meta")
    else:
        model = empty_model(folder, source.config)
        source.read_layout(model)
    source.forms_to_quantize(model)
    if plan.method in ADAPTER_METHODS:
        last_layers = read_mlx_settings(plan.config.mlx_config).num_layers
        targets = plan.config.lora_target_modules
        dora = plan.method == "dora"
        choose_targets(model, targets, dora=dora, last_layers=last_layers)
        left_out = warn_of_left_out(model, targets, dora=dora, last_layers=last_layers)
        return [*left_out, *warn_of_general(model, plan=plan), *warn_of_rope(source.config, plan=plan)]
    return warn_of_rope(source.config, plan=plan)
