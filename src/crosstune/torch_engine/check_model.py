"""Check that a model folder can be trained as planned, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.torch_engine.kernels.choose import warn_of_general
from crosstune.torch_engine.loading.adapters import choose_adapted, warn_of_left_out
from crosstune.torch_engine.loading.load import empty_model, open_source, read_pretrained


def check_model(folder: Path, *, plan: Plan) -> list[str]:
    """Raise the errors of loading and adapting the model without reading weights; return warnings."""
    source = open_source(folder, plan)
    if source.is_plain:
        model = read_pretrained(folder, plan=plan, device="meta")
    else:
        model = empty_model(folder, source.config)
        source.read_layout(model)
    source.forms_to_quantize(model)
    if plan.method in ADAPTER_METHODS:
        left_out = warn_of_left_out(model, choose_adapted(model, plan), plan)
        return [*left_out, *warn_of_general(model, plan=plan), *warn_of_rope(source.config, plan=plan)]
    return warn_of_rope(source.config, plan=plan)


def warn_of_rope(config: Any, *, plan: Plan) -> list[str]:
    """Return a warning if rows may exceed the length at which the rotary frequencies change."""
    config_length = plan.config.context_length
    is_alone = plan.config.batch_size == 1 and not plan.config.packing
    for rope in _ropes(config):
        kind, limit = rope.get("rope_type"), _limit(rope, config)
        # longrope depends on the longest row of the micro-batch only; dynamic frequencies keep the longest row ever seen.
        if limit is None or config_length <= limit or (kind == "longrope" and is_alone):
            continue
        other = " or --batch_size 1 without --packing" if kind == "longrope" else ""
        return [
            f"context_length: beyond {limit:,} tokens, this model ({kind}) chooses its rotary frequencies by the longest "
            "row of a micro-batch, so the loss of a row depends on the other rows, and in packed rows on the longest "
            f"document; to avoid that, use --context_length {limit}{other}"
        ]
    return []


def _ropes(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings of a model; it may have one for each type of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        yield settings
    else:
        yield from (each for each in settings.values() if isinstance(each, Mapping))


def _limit(rope: Mapping[str, Any], config: Any) -> int | None:
    """Return the length above which the frequencies change; None if they are fixed."""
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings if rope.get("rope_type") == "dynamic" else None
