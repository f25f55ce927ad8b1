"""Rows in which several answers share one prompt: the prompt once, then a branch for each answer.

A token attends to the prompt and to earlier tokens of its own branch; positions restart after the prompt. So a row computes the
same as separate rows of prompt and answer. Each branch begins with the prompt's last token, whose output predicts its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from crosstune.data.batches.token_batch import (
    IGNORED,
    LENGTH_STEP,
    Example,
    IntArray,
    TokenBatch,
    pack_rows,
    pad_rows,
)


@dataclass(frozen=True)
class Fork:
    """Answers to one prompt, as whole rows."""

    examples: tuple[Example, ...]

    @cached_property
    def num_shared(self) -> int:
        """The number of tokens computed once: one less than the rows have in common before the first supervised token."""
        first, *others = (example.tokens for example in self.examples)
        most = min(int(example.supervised.argmax()) for example in self.examples)
        for tokens in others:
            differs = np.flatnonzero(first[:most] != tokens[:most])
            most = int(differs[0]) if len(differs) else most
        return max(0, most - 1) if others else 0

    @property
    def length(self) -> int:
        return self.num_shared + sum(len(example.tokens) - self.num_shared for example in self.examples)


@dataclass(frozen=True, kw_only=True)
class ForkedBatch(TokenBatch):
    """Rows of forks. `segments` number the forks of a row."""

    branches: IntArray
    """0 for a shared prompt and for padding, otherwise the number of the branch in its fork, counted from 1."""

    def document_numbers(self) -> IntArray:
        """Return a number for each token that differs between rows, forks and branches, in their order."""
        rows = np.arange(len(self.segments), dtype=np.int64)[:, None] * (int(self.segments.max()) + 1)
        numbers = (rows + self.segments) * (int(self.branches.max()) + 1) + self.branches
        return np.unique(numbers, return_inverse=True)[1].reshape(numbers.shape).astype(np.int32)


def fork_rows(rows: Sequence[Sequence[Fork]], *, pad_id: int) -> ForkedBatch:
    """Make rows of one or more forks each, padded on the right."""
    longest = max(sum(fork.length for fork in row) for row in rows)
    shape = (len(rows), -(-longest // LENGTH_STEP) * LENGTH_STEP)
    input_ids = np.full(shape, pad_id, dtype=np.int32)
    targets = np.full(shape, IGNORED, dtype=np.int32)
    segments, positions, branches = (np.zeros(shape, dtype=np.int32) for _ in range(3))
    for number, row in enumerate(rows):
        start = 0
        for segment, fork in enumerate(row, start=1):
            shared = fork.num_shared
            pieces: list[tuple[int, IntArray, NDArray[np.bool_] | None]]
            pieces = [(0, fork.examples[0].tokens[:shared], None)] if shared else []
            pieces += [
                (branch, example.tokens[shared:], example.supervised[shared:])
                for branch, example in enumerate(fork.examples, start=1)
            ]
            for branch, tokens, supervised in pieces:
                end = start + len(tokens)
                input_ids[number, start:end] = tokens
                segments[number, start:end], branches[number, start:end] = segment, branch
                positions[number, start:end] = np.arange(len(tokens)) + (shared if branch else 0)
                if supervised is not None:
                    targets[number, start : end - 1] = np.where(supervised[1:], tokens[1:], IGNORED)
                start = end
        positions[number, start:] = np.arange(shape[1] - start)
    return ForkedBatch(
        input_ids=input_ids, targets=targets, segments=segments, positions=positions, branches=branches
    )


Places = NDArray[np.int64]


def _forks(batch: ForkedBatch) -> Iterator[tuple[int, Places, list[Places]]]:
    """Yield each fork: its row, the places of its prompt, and the places of each branch."""
    for row, segments in enumerate(batch.segments):
        for segment in np.unique(segments[segments > 0]):
            places = np.flatnonzero(segments == segment)
            numbers = batch.branches[row, places]
            branches = [places[numbers == branch] for branch in np.unique(numbers[numbers > 0])]
            yield row, places[numbers == 0], branches


def key_layout(batch: ForkedBatch) -> tuple[IntArray, IntArray, NDArray[np.int64]]:
    """Return the layout of queries and keys for attention by sequence, over the real tokens of a one-row batch.

    The first branch of a fork follows its prompt, so both are one sequence. The queries of any other branch are a sequence
    whose keys are a copy of the prompt's keys and its own keys. Returns the bounds of the queries, the bounds of the keys,
    and the token of each key.
    """
    query_ends, key_ends, keys = [0], [0], list[NDArray[np.int64]]()
    for _, prompt, branches in _forks(batch):
        for number, own in enumerate(branches):
            keys.append(np.concatenate([prompt, own]))
            query_ends.append(query_ends[-1] + len(own) + (0 if number else len(prompt)))
            key_ends.append(key_ends[-1] + len(keys[-1]))
    return np.array(query_ends, np.int32), np.array(key_ends, np.int32), np.concatenate(keys)


def separate_rows(batch: ForkedBatch, *, pad_id: int = 0) -> TokenBatch:
    """Return prompt and answer for each branch, for a model that cannot share prompts: as separate rows, or for rows of
    several forks as packed documents of the same row."""
    rows: list[list[Example]] = [[] for _ in batch.segments]
    for row, prompt, branches in _forks(batch):
        for own in branches:
            answer = batch.targets[row, own[:-1]] != IGNORED
            rows[row].append(
                Example(
                    tokens=batch.input_ids[row, np.concatenate([prompt, own])],
                    supervised=np.concatenate([np.zeros(len(prompt) + 1, np.bool_), answer]),
                    index=0,
                )
            )
    if batch.is_packed:
        return pack_rows(rows, pad_id=pad_id)
    return pad_rows([example for row in rows for example in row], pad_id=pad_id)


@dataclass(frozen=True, kw_only=True)
class SplitForks:
    """The prompts and the branches of a batch as separate rows, to be computed in two passes."""

    prompts: IntArray
    """A row for each fork, padded on the left, so that all branches begin at the same position."""
    prompt_lengths: IntArray
    branches: IntArray
    """A row for each branch, padded on the right."""
    targets: IntArray
    fork_of: IntArray
    """The fork of each branch."""


def split_forks(batch: ForkedBatch, *, pad_id: int = 0) -> SplitForks:
    prompts, branches, targets, fork_of = list[IntArray](), list[IntArray](), list[IntArray](), list[int]()
    for row, prompt, answers in _forks(batch):
        prompts.append(batch.input_ids[row, prompt])
        branches += [batch.input_ids[row, own] for own in answers]
        targets += [batch.targets[row, own] for own in answers]
        fork_of += [len(prompts) - 1] * len(answers)
    width, longest = max(map(len, prompts)), max(map(len, branches))
    left = np.full((len(prompts), width), pad_id, dtype=np.int32)
    right = np.full((len(branches), longest), pad_id, dtype=np.int32)
    wanted = np.full(right.shape, IGNORED, dtype=np.int32)
    for number, tokens in enumerate(prompts):
        left[number, width - len(tokens) :] = tokens
    for number, (tokens, target) in enumerate(zip(branches, targets, strict=True)):
        right[number, : len(tokens)], wanted[number, : len(tokens)] = tokens, target
    return SplitForks(
        prompts=left,
        prompt_lengths=np.array(list(map(len, prompts)), dtype=np.int32),
        branches=right,
        targets=wanted,
        fork_of=np.array(fork_of, dtype=np.int32),
    )
