"""Warn where a row's rotary frequencies depend on the rows beside it: transformers chooses them by the longest row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from crosstune.config.plan import Plan


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
