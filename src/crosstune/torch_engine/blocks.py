"""Block expansion (Llama-Pro): copies of decoder blocks that at first pass everything through, and alone are trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.core.errors import UserError

_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.+)$")
ZEROED = ("o_proj.weight", "down_proj.weight", "dense.weight", "fc2.weight", "o_proj.bias", "down_proj.bias")
"""What writes a block's results into the stream: at zero, a new block changes nothing."""


@dataclass(frozen=True)
class Expansion:
    """Block `i` of the expanded model is block `sources[i]` of the base; `new` holds the added ones."""

    sources: tuple[int, ...]
    new: frozenset[int]

    def names(self, base_name: str) -> list[tuple[str, bool]]:
        """The names that a base tensor has in the expanded model, each with whether its values are zeroed there."""
        match = _LAYER.match(base_name)
        if match is None:
            return [(base_name, False)]
        stem, number, rest = match.group(1), int(match.group(2)), match.group(3)
        return [
            (f"{stem}.{place}.{rest}", place in self.new and rest.endswith(ZEROED))
            for place, source in enumerate(self.sources)
            if source == number
        ]

    def is_new(self, name: str) -> bool:
        match = _LAYER.match(name)
        return match is not None and int(match.group(2)) in self.new


def expand_evenly(num_layers: int, num_new: int) -> Expansion:
    """One copy after every so many blocks."""
    if not 0 < num_new <= num_layers or num_layers % num_new:
        divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise UserError(
            f"{num_new} new blocks cannot be spread evenly over {num_layers}.",
            do=f"use --num_new_blocks {', '.join(map(str, divisors))}",
        )
    every = num_layers // num_new
    sources: list[int] = []
    new: set[int] = set()
    for layer in range(num_layers):
        sources.append(layer)
        if (layer + 1) % every == 0:
            new.add(len(sources))
            sources.append(layer)
    return Expansion(tuple(sources), frozenset(new))


def read_expanded_name(folder_name: str) -> tuple[int, int] | None:
    """Old and new number of blocks from a folder named ..._blk_exp-<old>-<new>, as other tools write them."""
    match = re.search(r"_blk_exp-(\d+)-(\d+)$", folder_name)
    return (int(match.group(1)), int(match.group(2))) if match else None


def already_expanded(old: int, new: int) -> Expansion:
    """A folder whose blocks are there already: nothing is copied, and the added ones are where even spreading puts them."""
    spread = expand_evenly(old, new - old)
    return Expansion(tuple(range(new)), spread.new)


def expand_config(config: Any, expansion: Expansion) -> Any:
    """The model's config with more blocks; settings that are given per block are spread the same way."""
    expanded = copy.deepcopy(config)
    old = config.num_hidden_layers
    expanded.num_hidden_layers = len(expansion.sources)
    values: Mapping[str, Any] = config.to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == old and name in ("layer_types", "no_rope_layers"):
            setattr(expanded, name, [value[source] for source in expansion.sources])
    return expanded
