"""Learn rewards from pairs of answers: tokenized pairs, their batches, and the Bradley-Terry loss on both engines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches.token_batch import IntArray, pad_rows
from crosstune.data.tokens.corpus import Corpus
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.judge.examples import as_preference, reward_place
from crosstune.recipes.judge.items import Item, swapped
from crosstune.recipes.preference.open_pairs import PreferenceCorpus, tokenize


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The loss of a scalar head: the squared error of scores, or the loss of rewards from pairs by Bradley and Terry."""

    of_pairs: bool = False
    center: float = 0.0
    """Weight of the penalty of reward sums that are not 0 (arXiv:2312.09244)."""

    @property
    def metric_names(self) -> Sequence[str]:
        return ("accuracy", "margin", "mean_reward") if self.of_pairs else ("absolute_error",)

    def __call__(self, outputs: Any, targets: Any, f: ModuleType) -> tuple[Any, dict[str, tuple[Any, Any]]]:
        """Return the loss, summed over the rows or pairs, and the sums of the metrics. `targets`: scores as fractions of the
        scale, or the margins of pairs, whose better answer is first (arXiv:1706.03741, margins 2307.09288). `f`: the
        `array_functions` of an engine."""
        given = f.detach(outputs)
        if not self.of_pairs:
            error = f.absolute(given - targets).sum()
            return ((outputs - targets) ** 2).sum(), {"absolute_error": (error, len(given))}
        better, worse = outputs[::2], outputs[1::2]
        loss = -f.log_sigmoid(better - worse - targets).sum()
        if self.center:
            loss = loss + self.center * ((better + worse) ** 2).sum()
        better, worse, count = given[::2], given[1::2], len(targets)
        values = ((better > worse).sum(), count), ((better - worse).sum(), count), (given.sum(), len(given))
        return loss, dict(zip(self.metric_names, values, strict=True))


@dataclass(frozen=True, kw_only=True)
class RewardBatch:
    """The rows of pairs, the better answer first."""

    input_ids: IntArray
    ends: IntArray
    """The token of each row whose output is the reward."""
    scores: NDArray[np.float32]
    """The margin of each pair."""
    num_tokens: int

    @property
    def weight(self) -> int:
        """The number of pairs."""
        return len(self.scores)


@dataclass(frozen=True, kw_only=True)
class PairCorpus:
    """Tokenized pairs whose answers both fit into the context."""

    pairs: PreferenceCorpus
    items: Sequence[Item]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def corpus(self) -> Corpus:
        """A row for each answer."""
        return self.pairs.corpus

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each pair."""
        lengths, first = self.corpus.lengths(), self.pairs.first
        return np.asarray(lengths[first] + lengths[first + 1], np.int64)

    def batch(self, places: Sequence[int], *, pad_id: int) -> RewardBatch:
        rows = [example for place in places for example in self.pairs[place].examples]
        plain = pad_rows(rows, pad_id=pad_id)
        return RewardBatch(
            input_ids=plain.input_ids,
            ends=np.array([reward_place(row, pad_id) for row in rows], dtype=np.int32),
            scores=np.array([self.items[place].margin for place in places], dtype=np.float32),
            num_tokens=plain.num_tokens,
        )

    def identity(self) -> str:
        sha = hashlib.sha256(self.corpus.hashes().astype("<u8").tobytes())
        sha.update(self.pairs.first.astype("<i8").tobytes())
        sha.update(np.array([item.margin for item in self.items], "<f4").tobytes())
        return sha.hexdigest()


def encode_pairs(items: Sequence[Item], tokenizer: Tokenizer, **options: Any) -> PairCorpus:
    """Tokenize the conversation with each answer of the pairs. `options`: see `tokenize`."""
    ordered = [item if item.winner == "A" else swapped(item) for item in items]
    found = [replace(as_preference(item), place=f"item {item.id}") for item in ordered]
    item_of = {id(one): item for one, item in zip(found, items, strict=True)}
    pairs = tokenize(found, tokenizer, ways=("drop",), **options)
    kept = [item_of[id(one)] for one in pairs.preferences]
    return PairCorpus(pairs=pairs, items=kept)
