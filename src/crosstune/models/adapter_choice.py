"""Which layers get an adapter, and of what kind: rules on names alone, the same for every engine."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from crosstune.config.schema import Config
from crosstune.core.errors import UserError

DEFAULT_TARGETS = ("q_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    rank: int
    alpha: float
    dropout: float
    rank_stabilized: bool
    """Divide alpha by the square root of the rank (rsLoRA), not by the rank."""
    magnitudes: bool
    """DoRA: learn the length of each row of the weight apart from its direction."""

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
    """Those of the linear layers that `targets` selects: all, default, names with commas, or a regex.

    `linears` leaves out the output head; `model` is the word for the model in an error. `last_layers` leaves out what is
    not in so many of the last blocks; None and -1 are all of them.
    """
    if last_layers is not None and last_layers >= 0:
        first = max((_block(name) for name in linears), default=-1) + 1 - last_layers
        linears = [name for name in linears if _block(name) >= max(first, 0)]
    if not linears:
        raise UserError(
            "This model has no linear layers that adapters can stand beside.",
            why=f"{model} builds its layers from other parts.",
            do="use --train_type full",
        )
    if targets == "all":
        return list(linears)
    words = DEFAULT_TARGETS if targets == "default" else tuple(word.strip() for word in targets.split(","))
    by_word = {word: {name for name in linears if _is_named(name, word)} for word in words}
    idle = [word for word, names in by_word.items() if not names]
    chosen = set[str]().union(*by_word.values())
    if idle and targets != "default":
        # A comma can also be part of one pattern.
        chosen = {name for name in linears if _matches(targets, name)}
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(
            f"lora_target_modules '{', '.join(idle)}' matches no linear layer of this model.",
            do=f"use all, names among: {', '.join(kinds)}, or a regex of whole names",
        )
    return [name for name in linears if name in chosen]


def short_names(adapted: Iterable[str], bare: Iterable[str]) -> list[str]:
    """How PEFT is told which layers have adapters: by last names such as q_proj, or by whole names where a last
    name would also match a layer without one."""
    whole = sorted(adapted)
    endings = {name.rpartition(".")[2] for name in whole}
    if any(name.rpartition(".")[2] in endings for name in bare):
        return whole
    return sorted(endings)


def _block(name: str) -> int:
    """The number in a name such as model.layers.3.mlp.up_proj; -1 where there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def _is_named(name: str, word: str) -> bool:
    """By its whole or last name, or by a pattern. A word that is no pattern may still be a part of one."""
    if name == word or name.endswith("." + word):
        return True
    try:
        return re.fullmatch(word, name) is not None
    except re.error:
        return False


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise UserError(f"lora_target_modules '{pattern}' is not a valid pattern.", why=str(error)) from error
