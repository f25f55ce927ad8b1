"""Check that a model folder can be trained as planned, from its config and the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.torch_engine.kernels.choose import warn_of_general
from crosstune.torch_engine.loading.adapters import choose_adapted, saved_parameters, warn_of_left_out
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
        chosen = choose_adapted(model, plan)
        left_out = warn_of_left_out(model, chosen, plan)
        saved_parameters(model, plan, adapted=chosen)
        return [*left_out, *warn_of_general(model, plan=plan), *warn_of_rope(source.config, plan=plan)]
    return warn_of_rope(source.config, plan=plan)


def warn_of_rope(config: Any, *, plan: Plan) -> list[str]:
    """Return a warning if rows may exceed the length at which the rotary frequencies change."""
    settings = getattr(config, "rope_parameters", None) or {}
    is_alone = plan.config.batch_size == 1 and not plan.config.packing
    for rope in (
        [settings] if "rope_type" in settings else settings.values()
    ):  # a model may have one per type of layer
        kind = rope.get("rope_type") if isinstance(rope, Mapping) else None
        # longrope depends on the longest row of the micro-batch only; dynamic frequencies keep the longest row ever seen.
        if kind not in ("longrope", "dynamic") or (kind == "longrope" and is_alone):
            continue
        limit = config.max_position_embeddings
        if kind == "longrope":
            limit = rope.get("original_max_position_embeddings") or limit
        if limit is None or plan.config.context_length <= limit:
            continue
        other = " or --batch_size 1 without --packing" if kind == "longrope" else ""
        return [
            f"context_length: beyond {limit:,} tokens, this model ({kind}) chooses its rotary frequencies by the longest "
            "row of a micro-batch, so the loss of a row depends on the other rows, and in packed rows on the longest "
            f"document; to avoid that, use --context_length {limit}{other}"
        ]
    return []
