"""Check that a model folder can be trained as planned, from its config and the names of its tensors alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.resolve.plan import Plan
from crosstune.torch_engine.kernels.choose import warn_of_general
from crosstune.torch_engine.loading.adapters import choose_targets, warn_of_left_out
from crosstune.torch_engine.loading.load import empty_model, open_source, read_pretrained


def warn_of_rope(config: Any, *, plan: Plan) -> list[str]:
    """Return a warning if rows may be longer than the length from which a model's frequencies change."""
    asked = plan.config
    alone = asked.batch_size == 1 and not asked.packing
    for rope in _ropes(config):
        kind, limit = rope.get("rope_type"), _limit(rope, config)
        # With longrope, a row that is alone gets the frequencies of its own length; dynamic ones keep the longest seen.
        if limit is None or asked.context_length <= limit or (kind == "longrope" and alone):
            continue
        exact = (
            " or --batch_size 1 without --packing" if kind == "longrope" else ", which the model is made for"
        )
        return [
            f"context_length: beyond {limit:,} tokens, the rotary frequencies of this model ({kind}) are those of the "
            f"longest row in a micro-batch, so a row's loss depends on the rows beside it, and packed rows on their "
            f"longest document; it does not with --context_length {limit}{exact}"
        ]
    return []


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of each kind of rotary table; a model may have one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        yield settings
    else:
        yield from (each for each in settings.values() if isinstance(each, Mapping))


def _limit(rope: Mapping[str, Any], config: Any) -> int | None:
    """Return the length above which the frequencies are others; None if they are fixed."""
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings if rope.get("rope_type") == "dynamic" else None


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
