"""Find the smallest GGUF file whose token distributions stay near the trained model's on the run's held-out rows.

Every file on the way is written and measured in llama.cpp, so the choice does not depend on estimates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Preparing
from crosstune.core.logit_distance import Logits, measure_agreement
from crosstune.models import llama_cpp
from crosstune.models.folder import read_config_json
from crosstune.models.gguf_writer import plan_types
from crosstune.results.opened import Opened, read_logits, show_rows

REQUEST = "Cannot choose a GGUF type by --max_kl."
_RECIPES = ("q3_k_m", "iq4_xs", "q4_k_m", "q5_k_m", "q6_k", "q8_0")
_GROUPS = {
    "attention": r"attn_(q|k|v|qkv)\.",
    "attention output": r"attn_output\.",
    "feed-forward up": r"ffn_(up|gate)",
    "feed-forward down": r"ffn_down",
    "embeddings": r"^(token_embd|output)\.",
}
_LEVELS = 3
"""After this many consecutive recipes above the bound, smaller ones are tried for groups of layers only."""
_MOST_TRIALS = 20
_TOKENS = 1024
_LOGIT_BYTES = 1 << 28
_ROW_TOKENS = 256

Write = Callable[[Path, str, Mapping[str, str], Path | None], None]
"""Write a file: path, recipe, types that replace the recipe's, a file with tensors to copy."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A file that was measured."""

    recipe: str
    lowered: Mapping[str, str]
    """Group of layers -> the smaller recipe that gives its types."""
    types: Mapping[str, str]
    sizes: Mapping[str, int]
    """The bytes of each tensor."""
    kl: float

    @property
    def kind(self) -> str:
        """The recipe with the fewest bits in it."""
        return [self.recipe, *self.lowered.values()][-1]

    @property
    def name(self) -> str:
        groups = {
            kind: [group for group in self.lowered if self.lowered[group] == kind]
            for kind in self.lowered.values()
        }
        parts = "; ".join(f"{', '.join(names)} in {kind}" for kind, names in groups.items())
        return f"{self.recipe} with {parts}" if parts else self.recipe

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": sum(self.sizes.values()), "kl": self.kl}


class Search:
    """Measures files against the trained model's logits on held-out rows; the best file so far is kept at `best`."""

    def __init__(
        self,
        folder: Path,
        opened: Opened,
        rows: Sequence[Sequence[int]],
        write: Write,
        scratch: Path,
        observer: Observer,
    ) -> None:
        vocab = int(read_config_json(folder)["vocab_size"])
        self.rows = _bounded(rows, min(_TOKENS, max(_ROW_TOKENS, _LOGIT_BYTES // (4 * vocab))))
        self.num_tokens = sum(map(len, self.rows))
        self.observer = observer
        doing = f"computing {self.num_tokens:,} held-out tokens with the trained model"
        observer.on_event(Preparing(doing=doing))
        self.expected: Logits = read_logits(folder, replace(opened, prompts=self.rows))
        self.folder, self.write = folder, write
        self.best, self.tried = scratch / "best.gguf", scratch / "tried.gguf"
        self.trials: list[Trial] = []
        self.too_coarse: set[str] = set()
        """Groups above the bound in a larger recipe; smaller ones are not tried for them."""

    def run(self, *, plain: str, max_kl: float, weighted: bool) -> tuple[Trial, list[Trial]]:
        """Return the chosen file and all files measured. Recipes are tried from the largest, as the smallest take longest to
        write; then groups of layers get the types of smaller recipes, and keep them if the file stays within the bound."""
        plans = {kind: plan_types(self.folder, kind, weighted=weighted) for kind in _RECIPES}
        chosen, smaller = None, list[Trial]()
        for kind in sorted(plans, key=lambda kind: sum(plans[kind][1].values()), reverse=True):
            if any(plans[kind][0] == trial.types for trial in self.trials):
                continue  # rows that 256 does not divide give some recipes the same types
            trial = self._measure(kind, {}, *plans[kind])
            if trial.kl <= max_kl:
                self.tried.replace(self.best)
                chosen, smaller = trial, []
            else:
                smaller.append(trial)
            if len(smaller) == _LEVELS:
                break
        if chosen is None:
            chosen = self._measure(plain, {}, *plan_types(self.folder, plain))
            self.tried.replace(self.best)
        if chosen.kl > max_kl:
            least = min(trial.kl for trial in self.trials)
            raise UserError(
                REQUEST,
                why=f"even {plain} has a KL divergence of {least:.2g} from the trained model in llama.cpp, above {max_kl:g}.",
                do=f"use --max_kl {2 * least:.1g}, or choose a type with --gguf_type",
            )
        for number, trial in enumerate(smaller):
            if all(trial.kl < other.kl for other in smaller[number + 1 :]):  # else a smaller file is better
                chosen = self._lower_groups(chosen, trial, max_kl)
        return chosen, self.trials

    def _lower_groups(self, chosen: Trial, recipe: Trial, max_kl: float) -> Trial:
        """Give groups of layers the types of a smaller recipe, the largest saving first. If that makes a group too coarse,
        only its middle half gets them: the first and last layers need more bits."""
        layers = sorted(
            {int(found[1]) for name in chosen.types if (found := re.match(r"blk\.(\d+)\.", name))}
        )
        middle = "|".join(map(str, layers[len(layers) // 4 : len(layers) - len(layers) // 4]))

        def lower(pattern: str) -> dict[str, int]:
            sizes, smaller = chosen.sizes, recipe.sizes
            return {
                name: smaller[name]
                for name in sizes
                if re.search(pattern, name) and smaller[name] < sizes[name]
            }

        saved = {
            group: sum(chosen.sizes[name] - size for name, size in lower(pattern).items())
            for group, pattern in _GROUPS.items()
        }
        for group in sorted((each for each in saved if saved[each]), key=saved.__getitem__, reverse=True):
            whole = _GROUPS[group]
            for key, pattern in ((group, whole), (f"middle {group}", rf"^blk\.({middle})\..*{whole}")):
                if key in self.too_coarse:
                    continue
                sizes = lower(pattern)
                types = {**chosen.types, **{name: recipe.types[name] for name in sizes}}
                if any(types == trial.types for trial in self.trials):
                    continue
                if len(self.trials) == _MOST_TRIALS:
                    return chosen
                kept = {name: kind for name, kind in chosen.lowered.items() if not name.endswith(key)}
                lowered = {**kept, key: recipe.recipe}
                trial = self._measure(chosen.recipe, lowered, types, {**chosen.sizes, **sizes})
                if trial.kl <= max_kl:
                    self.tried.replace(self.best)
                    chosen = trial
                    break
                self.too_coarse.add(key)
        return chosen

    def _measure(
        self, recipe: str, lowered: Mapping[str, str], types: Mapping[str, str], sizes: Mapping[str, int]
    ) -> Trial:
        self.write(self.tried, recipe, types, self.best if lowered else None)
        trial = Trial(recipe=recipe, lowered=lowered, types=types, sizes=sizes, kl=0.0)
        number = f"{len(self.trials) + 1} of at most {_MOST_TRIALS}"
        title = f"measure  {number}: {trial.name}, {sum(sizes.values()) / 1e6:.1f} MB"
        show = show_rows(self.observer, title, len(self.rows), what="rows")
        last = len(self.rows) - 1  # the line of the last row comes below, with the divergence
        found = llama_cpp.ask(self.tried, prompts=self.rows, show=lambda done: show(min(done, last))).logits
        trial = replace(trial, kl=measure_agreement(self.expected, found).mean_kl)
        show(len(self.rows), f", KL {trial.kl:.2e}")
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
