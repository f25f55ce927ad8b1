"""Expand a model with copies of decoder blocks that start as the identity (LLaMA Pro); only they are trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crosstune.core.errors import UserError

_LAYER = re.compile(r"^(.*\blayers)\.(\d+)\.(.+)$")
_BLOCK = re.compile(r"^.*\blayers\.(\d+)$")
WRITERS = frozenset({"o_proj", "out_proj", "c_proj", "dense", "down_proj", "fc2", "dense_4h_to_h"})
"""Layers that write to the residual stream. With their weights and biases at zero, a new block is the identity."""


@dataclass(frozen=True)
class Expansion:
    """Block `i` of the expanded model is block `sources[i]` of the base; `new` lists the added blocks."""

    sources: tuple[int, ...]
    new: frozenset[int]

    @property
    def is_fresh(self) -> bool:
        """True if the new blocks are copied from the base; false if the folder already contains them."""
        return len(set(self.sources)) < len(self.sources)

    def names(self, base_name: str) -> list[tuple[str, bool]]:
        """Return a base tensor's names in the expanded model, each with a flag that is true if its values become zero."""
        match = _LAYER.match(base_name)
        if match is None:
            return [(base_name, False)]
        prefix, number, suffix = match.group(1), int(match.group(2)), match.group(3)
        return [
            (f"{prefix}.{index}.{suffix}", self.is_fresh and index in self.new and _writes_stream(suffix))
            for index, source in enumerate(self.sources)
            if source == number
        ]

    def is_new(self, name: str) -> bool:
        return in_blocks(name, self.new)


def in_blocks(name: str, blocks: Collection[int]) -> bool:
    """Return True if a tensor belongs to one of these blocks."""
    match = _LAYER.match(name)
    return match is not None and int(match.group(2)) in blocks


def _writes_stream(name: str) -> bool:
    layer, _, part = name.rpartition(".")
    return part in ("weight", "bias") and layer.rpartition(".")[2] in WRITERS


def expand_evenly(num_layers: int, num_new: int) -> Expansion:
    """Return an expansion with copies at even distances; raise if the number of blocks is not divisible."""
    if not 0 < num_new <= num_layers or num_layers % num_new:
        divisors = [n for n in range(1, num_layers + 1) if num_layers % n == 0]
        raise UserError(
            f"{num_new} new blocks cannot be spread evenly across {num_layers}.",
            do=f"use --num_new_blocks {', '.join(map(str, divisors))}",
        )
    every = num_layers // num_new
    sources = [layer for layer in range(num_layers) for _ in range(1 + ((layer + 1) % every == 0))]
    return Expansion(tuple(sources), frozenset(range(every, len(sources), every + 1)))


def already_expanded(old: int, new: int) -> Expansion:
    """Return the expansion of a folder that already has its new blocks, at the positions of `expand_evenly`."""
    return Expansion(tuple(range(new)), expand_evenly(old, new - old).new)


@torch.no_grad()
def check_passes_through(model: nn.Module, expansion: Expansion, *, device: torch.device) -> None:
    """Check with one short row that every new block returns its input.

    A block that writes to the residual stream through a layer with a different name, or normalizes the stream, does not.
    """
    changed: list[nn.Module] = []

    def compare(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if not torch.equal(hidden, out[0] if isinstance(out, tuple) else out):
            changed.append(block)

    hooks = [
        block.register_forward_hook(compare, with_kwargs=True)
        for name, block in model.named_modules()
        if (match := _BLOCK.match(name)) is not None and int(match.group(1)) in expansion.new
    ]
    was_training = model.training
    model.eval()
    model(input_ids=torch.arange(4, device=device)[None])
    model.train(was_training)
    for hook in hooks:
        hook.remove()
    if changed:
        raise UserError(
            f"llama_pro cannot add blocks to {type(model).__name__}.",
            why="a copied block does not return its input unchanged, so training would not start from the base model.",
            do="use --train_type lora or full",
        )


def expand_config(config: Any, expansion: Expansion) -> Any:
    """Return the config of the expanded model; per-layer settings are expanded like the blocks."""
    expanded = copy.deepcopy(config)
    expanded.num_hidden_layers = len(expansion.sources)
    for name in ("layer_types", "no_rope_layers"):
        value = config.to_dict().get(name)  # some configs derive the attribute
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(expanded, name, [value[source] for source in expansion.sources])
    return expanded
