"""Find the smallest GGUF file whose token distributions stay near the trained model's on the run's held-out rows.

Every file on the way is written and measured in llama.cpp, so no estimate decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.logit_distance import Logits, measure_agreement
from crosstune.models import llama_cpp
from crosstune.models.folder import read_config_json
from crosstune.models.gguf_writer import plan_types
from crosstune.results.opened import Opened, read_logits

REQUEST = "Cannot choose a GGUF type by --max_kl."
_RECIPES = ("q3_k_m", "iq4_xs", "q4_k_m", "q5_k_m", "q6_k", "q8_0")
_GROUPS = {
    "attention": r"attn_(q|k|v|qkv)\.",
    "attention output": r"attn_output\.",
    "feed-forward up": r"ffn_(up|gate)",
    "feed-forward down": r"ffn_down",
    "embeddings": r"^(token_embd|output)\.",
}
_TOKENS = 1024
_LOGIT_BYTES = 1 << 28
_ROW_TOKENS = 256

Write = Callable[[Path, str, Mapping[str, str] | None], None]
"""Write a file: path, recipe, types that replace the recipe's."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A file that was measured."""

    name: str
    kind: str
    """The recipe with the fewest bits in it."""
    types: Mapping[str, str] = field(repr=False)
    num_bytes: int
    kl: float

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.num_bytes, "kl": self.kl}


class Search:
    """Measures files against the trained model's logits on held-out rows; the best file so far is kept at `best`."""

    def __init__(
        self, folder: Path, opened: Opened, rows: Sequence[Sequence[int]], write: Write, scratch: Path
    ) -> None:
        vocab = int(read_config_json(folder)["vocab_size"])
        self.rows = _bounded(rows, min(_TOKENS, max(_ROW_TOKENS, _LOGIT_BYTES // (4 * vocab))))
        self.expected: Logits = read_logits(folder, replace(opened, prompts=self.rows))
        self.folder, self.write = folder, write
        self.best, self.tried = scratch / "best.gguf", scratch / "tried.gguf"
        self.trials: list[Trial] = []

    def run(self, *, plain: str, max_kl: float, weighted: bool) -> tuple[Trial, list[Trial]]:
        """Return the chosen file and all files measured. Recipes are tried from the smallest; then each group of layers
        gets the types of the recipe before, the largest saving first, and keeps them if the file stays within the bound."""
        plans = {kind: plan_types(self.folder, kind, weighted=weighted) for kind in (*_RECIPES, plain)}
        order = sorted(plans, key=lambda kind: sum(plans[kind][1].values()))
        smaller: str | None = None
        for kind in order:
            types, sizes = plans[kind]
            if smaller is not None and types == plans[smaller][0]:
                continue  # rows that 256 does not divide give some recipes the same types
            chosen = self._measure(kind, kind, types, sum(sizes.values()))
            if chosen.kl <= max_kl:
                break
            smaller = kind
        else:
            least = min(trial.kl for trial in self.trials)
            raise UserError(
                REQUEST,
                why=f"even {plain} has a KL divergence of {least:.2g} from the trained model in llama.cpp, above {max_kl:g}.",
                do=f"use --max_kl {2 * least:.1g}, or choose a type with --gguf_type",
            )
        self.tried.replace(self.best)
        if smaller is not None and chosen.name != plain:
            chosen = self._lower_groups(chosen, smaller, plans, max_kl)
        return chosen, self.trials

    def _lower_groups(self, chosen: Trial, smaller: str, plans: Mapping[str, Any], max_kl: float) -> Trial:
        lower, low_sizes = plans[smaller]
        sizes, recipe = plans[chosen.name][1], chosen.name
        lowered = list[str]()
        savings = {
            group: sum(
                sizes[name] - low_sizes[name]
                for name in sizes
                if re.search(pattern, name) and low_sizes[name] < sizes[name]
            )
            for group, pattern in _GROUPS.items()
        }
        for group in sorted(
            (each for each in savings if savings[each]), key=savings.__getitem__, reverse=True
        ):
            types = {
                name: lower[name]
                if re.search(_GROUPS[group], name) and low_sizes[name] < sizes[name]
                else kept
                for name, kept in chosen.types.items()
            }
            name = f"{recipe} with {', '.join([*lowered, group])} in {smaller}"
            trial = self._measure(name, smaller, types, chosen.num_bytes - savings[group], recipe=recipe)
            if trial.kl <= max_kl:
                self.tried.replace(self.best)
                chosen = trial
                lowered.append(group)
        return chosen

    def _measure(
        self, name: str, kind: str, types: Mapping[str, str], num_bytes: int, *, recipe: str | None = None
    ) -> Trial:
        self.write(self.tried, recipe or kind, types)
        found = llama_cpp.ask(self.tried, prompts=self.rows).logits
        kl = measure_agreement(self.expected, found).mean_kl
        trial = Trial(name=name, kind=kind, types=types, num_bytes=num_bytes, kl=kl)
        self.trials.append(trial)
        return trial


def _bounded(rows: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Return rows of at most `num_tokens` in total, each cut to a length that lets several rows in."""
    kept, left = list[list[int]](), num_tokens
    for row in rows:
        if left < 2:
            break
        kept.append(list(row[: min(_ROW_TOKENS, left)]))
        left -= len(kept[-1])
    return kept
