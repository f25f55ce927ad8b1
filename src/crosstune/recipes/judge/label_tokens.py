"""Find the tokens of the labels of a verdict, and their position in an example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.rendering import encode_conversation
from crosstune.data.token_batch import IntArray
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.judge.verdicts import VerdictFormat

_QUESTION = [{"role": "user", "content": "Rate the answer."}]


@dataclass(frozen=True, kw_only=True)
class LabelTokens:
    """The labels as token sequences, as far as they differ from each other.

    A label of several tokens, such as 10 beside 1, is told apart at a later token: `paths` are the token prefixes after
    which labels differ, the empty one first.
    """

    before: tuple[int, ...]
    """The tokens of a verdict before its label."""
    sequences: tuple[tuple[int, ...], ...]
    """The tokens of each label, up to the first that is unique to it."""

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The token prefixes with more than one continuation, shortest first."""
        found: dict[tuple[int, ...], set[int]] = {}
        for sequence in self.sequences:
            for length in range(len(sequence)):
                found.setdefault(sequence[:length], set()).add(sequence[length])
        branching = [path for path, following in found.items() if len(following) > 1]
        return tuple(sorted(branching, key=lambda path: (len(path), path)))

    @property
    def probes(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences to append to a prompt so that all paths are covered; usually one."""
        paths = self.paths
        return tuple(
            path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the labels."""
        return tuple(sorted({token for sequence in self.sequences for token in sequence}))

    def log_probs(
        self, log_probs: Sequence[dict[tuple[int, ...], NDArray[np.float64]]]
    ) -> NDArray[np.float64]:
        """Return the log probability of each label of each item, normalized over the labels, from those of `token_ids`
        after each path."""
        places = {token: place for place, token in enumerate(self.token_ids)}
        paths = set(self.paths)
        found = np.zeros((len(log_probs), len(self.sequences)))
        for row, known in enumerate(log_probs):
            for label, sequence in enumerate(self.sequences):
                for length in range(len(sequence)):
                    if sequence[:length] in paths:
                        found[row, label] += known[sequence[:length]][places[sequence[length]]]
        shifted = found - found.max(axis=1, keepdims=True)
        normalized: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        return normalized

    def place_in(self, tokens: IntArray, supervised: NDArray[np.bool_]) -> int:
        """Return the index of the first label token of an example, after the last `before` in its verdict; -1 if the
        verdict has another form."""
        [own] = supervised.nonzero()
        if not len(own):
            return -1
        first, length = int(own[0]), len(self.before)
        verdict = tokens[first:].tolist()
        for start in range(len(verdict) - length - 1, -1, -1):
            if tuple(verdict[start : start + length]) == self.before and (length or start == 0):
                return first + start + length
        return -1


def find_label_tokens(verdict: VerdictFormat, tokenizer: Tokenizer) -> LabelTokens:
    """Tokenize a verdict with each of the labels, and compare."""
    examples = [
        encode_conversation(
            [*_QUESTION, {"role": "assistant", "content": verdict.write(label)}],
            tokenizer,
            index=0,
            whole=False,
        )
        for label in verdict.labels.texts
    ]
    texts = [example.tokens.tolist() for example in examples]
    first = int(examples[0].supervised.argmax()) if examples[0].supervised.any() else 0
    common = common_length(texts)
    if common < first:
        raise UserError(
            f"The verdict format {verdict.name} does not work with this tokenizer.",
            why="its tokens before the verdict depend on the label.",
            do="use another --verdict",
        )
    tails = [tuple(text[common:]) for text in texts]
    return LabelTokens(
        before=tuple(texts[0][first:common]), sequences=tuple(_distinct(tail, tails) for tail in tails)
    )


def _distinct(tail: tuple[int, ...], tails: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shortest prefix of a tail that no other tail has."""
    for length in range(1, len(tail) + 1):
        if sum(other[:length] == tail[:length] for other in tails) == 1:
            return tail[:length]
    raise UserError(
        "Two labels of the verdict have the same tokens.", do="use another --verdict, or another tokenizer"
    )


def common_length(texts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all texts share."""
    length = 0
    while all(len(text) > length and text[length] == texts[0][length] for text in texts):
        length += 1
    return length
