"""Choose the layers that get an adapter by their names, the same for every engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.name_patterns import match_names

_WORD = re.compile(r"[A-Za-z0-9_]+")
DEFAULT_TARGETS = ("q_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    rank: int
    alpha: float
    dropout: float
    rank_stabilized: bool
    """Scale by alpha / sqrt(rank) (rsLoRA) instead of alpha / rank."""
    magnitudes: bool
    """DoRA: learn the magnitude of each row of the weight separately from its direction."""

    @classmethod
    def from_config(cls, config: Config, *, method: str) -> AdapterSettings:
        return cls(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            rank_stabilized=config.use_rslora,
            magnitudes=method == "dora",
        )

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


def choose_names(
    linears: Sequence[str], targets: str, *, model: str, last_layers: int | None = None
) -> list[str]:
    """Return the linear layers that `targets` selects: all, default, comma-separated names, or a regex.

    `linears` does not contain the output head; `model` names the model in errors. `last_layers` limits the choice to
    that many of the last blocks; None and -1 mean all.
    """
    if last_layers is not None and last_layers >= 0:
        first = max((_block(name) for name in linears), default=-1) + 1 - last_layers
        linears = [name for name in linears if _block(name) >= max(first, 0)]
    if not linears:
        raise UserError(
            "This model has no linear layers for adapters.",
            why=f"{model} has layers of other kinds only.",
            do="use --train_type full",
        )
    if targets == "all":
        return list(linears)
    parts = DEFAULT_TARGETS if targets == "default" else tuple(part.strip() for part in targets.split(","))
    by_target = _by_target(parts, linears)
    unmatched = [part for part, names in by_target.items() if not names]
    chosen = set[str]().union(*by_target.values())
    if unmatched and targets != "default":
        # The comma may be part of a regex.
        chosen = _matching(targets, linears)
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(
            f"lora_target_modules '{', '.join(unmatched)[:200]}' matches no linear layer of this model.",
            do=f"use all, names among: {', '.join(kinds)}, or a regex that matches full names",
        )
    return [name for name in linears if name in chosen]


def short_names(adapted: Iterable[str], bare: Iterable[str]) -> list[str]:
    """Return PEFT's target_modules: last names such as q_proj, or full names if a last name would also match a layer
    without an adapter."""
    whole = sorted(adapted)
    endings = {name.rpartition(".")[2] for name in whole}
    if any(name.rpartition(".")[2] in endings for name in bare):
        return whole
    return sorted(endings)


def _block(name: str) -> int:
    """Return the block number in a name such as model.layers.3.mlp.up_proj; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _by_target(targets: Sequence[str], linears: Sequence[str]) -> dict[str, set[str]]:
    """Return for each target the layers whose full or last name it is, and those that it matches as a regex."""
    endings: dict[str, set[str]] = {}
    for name in linears:
        endings.setdefault(name, set()).add(name)
        for place, character in enumerate(name):
            if character == ".":
                endings.setdefault(name[place + 1 :], set()).add(name)
    patterns = [target for target in targets if not _WORD.fullmatch(target)]
    matched = dict(zip(patterns, match_names(patterns, linears), strict=True))
    # A target that is no valid pattern may be one part of a regex with commas.
    found = {target: matched.get(target, set()) for target in targets}
    return {
        target: endings.get(target, set()) | (names if isinstance(names, set) else set())
        for target, names in found.items()
    }


def _matching(pattern: str, linears: Sequence[str]) -> set[str]:
    found = match_names([pattern], linears)[0]
    if isinstance(found, str):
        raise UserError(f"lora_target_modules '{pattern[:80]}' is not a valid pattern.", why=found)
    return found
