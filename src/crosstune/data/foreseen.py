"""Tell from the likeliest tokens along the references how greedy decoding answers, without decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.core.protocols import UNSURE
from crosstune.data.token_batch import Example

Prompt = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """The first tokens of an answer."""

    tokens: list[int]
    is_whole: bool
    """Whether the answer ends after them."""


def foresee_answers(
    examples: Iterable[Example], predicted: NDArray[np.int64], *, stop_ids: Collection[int], limit: int
) -> Mapping[Prompt, Foreseen]:
    """Return what is known of the answer to each prompt, from the likeliest token at every supervised position of the
    examples, in their order. The last answer of an example is the one that is foreseen."""
    found: dict[Prompt, Foreseen] = {}
    start = 0
    for example in examples:
        [places] = example.supervised[1:].nonzero()
        likeliest = predicted[start : start + len(places)]
        start += len(places)
        if not len(places):
            continue
        first = int(np.flatnonzero(np.diff(places, prepend=-2) != 1)[-1])
        begin, end = int(places[first]) + 1, int(places[-1]) + 2
        prompt = tuple(example.tokens[:begin].tolist())
        found[prompt] = foresee(
            example.tokens[begin:end].tolist(), likeliest[first:].tolist(), stop_ids=stop_ids, limit=limit
        )
    assert start == len(predicted), "a prediction for every supervised position"
    return found


def foresee(
    reference: Sequence[int], likeliest: Sequence[int], *, stop_ids: Collection[int], limit: int
) -> Foreseen:
    """Follow the reference as long as each of its tokens is the likeliest, which greedy decoding would take. The first
    other token is known too; what follows it is not."""
    known: list[int] = []
    for wanted, token in zip(reference, likeliest, strict=True):
        if token == UNSURE:
            break
        if token in stop_ids:
            return Foreseen(tokens=known, is_whole=True)
        known.append(token)
        if len(known) == limit:
            return Foreseen(tokens=known, is_whole=True)
        if token != wanted:
            break
    return Foreseen(tokens=known, is_whole=False)


def has_left(beginning: str, reference: str) -> bool:
    """Return whether no answer with this beginning can equal the reference. Spaces do not count, since a tokenizer may
    join them with what follows, and neither does an incomplete character at the end."""
    written = _without_spaces(beginning).rstrip("\N{REPLACEMENT CHARACTER}")
    return not _without_spaces(reference).startswith(written)


def _without_spaces(text: str) -> str:
    return "".join(text.split())
