"""A micro-batch of answers, in pairs or with labels, and their log probabilities under the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from crosstune.core.protocols import Array
from crosstune.data.batches.forked import Fork, fork_rows, separate_rows
from crosstune.data.batches.token_batch import Example, TokenBatch, number_answers, pad_rows

Floats = NDArray[np.float32]
OTHER = "other_"
"""Prefix of the arrays of answers to other prompts."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Answers that are trained together: the chosen and the rejected answer of a pair, or one answer with a label."""

    examples: tuple[Example, ...]
    place: int
    """Its index in the data."""
    is_desirable: bool = True
    """Only for one answer."""
    other: Example | None = None
    """Only for one answer: the prompt with the answer to another prompt, for the KL estimate."""

    @property
    def lengths(self) -> list[int]:
        """The number of supervised tokens of each answer."""
        return [int(example.supervised[1:].sum()) for example in self.examples]


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch:
    """Answers in the order of their pairs, chosen before rejected."""

    tokens: TokenBatch
    lengths: Floats
    """Number of tokens of each answer."""
    mean_chosen: float
    """Mean length of the step's chosen answers, in tokens."""
    num_groups: int
    labels: Floats | None = None
    """1 for a desirable answer, 0 for others; None for pairs."""
    reference: Floats | None = None
    """Log probability of each answer under the reference, if it was computed before training."""
    others: TokenBatch | None = None
    """Answers to other prompts, for the KL estimate of kto."""
    other_reference: Floats | None = None

    @property
    def weight(self) -> int:
        """The number of pairs, or of single answers."""
        return self.num_groups

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def arrays(self, token_arrays: Callable[[TokenBatch], Mapping[str, Array]]) -> dict[str, Array]:
        """Return the arrays for an engine; `token_arrays` makes the arrays of tokens."""
        others = token_arrays(self.others) if self.others is not None else {}
        arrays = {
            **token_arrays(self.tokens),
            **{f"{OTHER}{name}": array for name, array in others.items()},
            "lengths": self.lengths,
            "mean_chosen": np.array(self.mean_chosen, dtype=np.float32),
            "labels": self.labels,
            "reference": self.reference,
            "other_reference": self.other_reference,
        }
        return {name: array for name, array in arrays.items() if array is not None}


def make_batch(
    rows: Sequence[Sequence[Group]],
    *,
    pad_id: int,
    shares_prompts: bool,
    mean_chosen: float,
    reference: Floats | None = None,
) -> PreferenceBatch:
    """Make a micro-batch from rows of groups. `reference` has the log probabilities of all answers of the data, a row for each
    group: of its answers, and of the other answer if the group is a single answer."""
    groups = [group for row in rows for group in row]
    forks = fork_rows([[Fork(group.examples) for group in row] for row in rows], pad_id=pad_id)
    tokens = forks if shares_prompts else separate_rows(forks, pad_id=pad_id)
    batch = PreferenceBatch(
        tokens=tokens,
        lengths=np.array([length for group in groups for length in group.lengths], dtype=np.float32),
        mean_chosen=mean_chosen,
        num_groups=len(groups),
    )
    assert number_answers(tokens).max(initial=-1) + 1 == len(batch.lengths), (
        "every answer has supervised tokens"
    )
    found = reference[[group.place for group in groups]] if reference is not None else None
    if len(groups[0].examples) == 2:
        return replace(batch, reference=found.reshape(-1) if found is not None else None)
    labels = np.array([group.is_desirable for group in groups], dtype=np.float32)
    others = [group.other for group in groups if group.other is not None]
    return replace(
        batch,
        labels=labels,
        others=pad_rows(others, pad_id=pad_id) if others else None,
        reference=found[:, 0] if found is not None else None,
        other_reference=found[:, 1] if found is not None and others else None,
    )
