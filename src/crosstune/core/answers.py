"""Generated answers: their tokens, their random numbers, and the grouping of equal prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstune.core.sampling import Sampling

Earlier = Mapping[tuple[int, ...], int]
"""The number of answers to each prompt in earlier calls: sampling continues with other random numbers."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer."""

    tokens: Sequence[int]
    """The new tokens, with the stop token at the end if there is one."""
    log_probs: Sequence[float]
    """The log probability of each token under the model's logits divided by the temperature (by 1 if it is 0), before filters
    and penalties."""
    stopped: bool
    """True if the last token is a stop token; otherwise the answer was cut."""

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        return list(self.tokens[:-1] if self.stopped else self.tokens)


OnToken = Callable[[int], None]
OnAnswer = Callable[[Answer], None]


@dataclass(frozen=True)
class Question:
    """A prompt and the indices of its answers in the results."""

    prompt: tuple[int, ...]
    places: list[int]
    num_earlier: int = 0
    """Answers to the same prompt in earlier calls."""

    def draws(self, sampling: Sampling, number: int, count: int) -> NDArray[np.float64]:
        """Return the random numbers of answer `number` of this call."""
        return draw_numbers(sampling, self.prompt, number=self.num_earlier + number, count=count)


def group_equal(prompts: Sequence[Sequence[int]], earlier: Earlier | None = None) -> list[Question]:
    """Return the distinct prompts, longest first, so that packs have little padding and memory runs out early or never."""
    counts = earlier or {}
    found: dict[tuple[int, ...], list[int]] = {}
    for place, prompt in enumerate(prompts):
        found.setdefault(tuple(prompt), []).append(place)
    return [
        Question(prompt, found[prompt], counts.get(prompt, 0))
        for prompt in sorted(found, key=len, reverse=True)
    ]


def draw_numbers(
    sampling: Sampling, prompt: Sequence[int], *, number: int, count: int
) -> NDArray[np.float64]:
    """Return the uniform numbers in [0, 1) that choose the tokens of answer `number` to a prompt."""
    key = hashlib.sha256(f"{sampling.seed} {number} {[*prompt]}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "little")))
    return generator.random(count)
