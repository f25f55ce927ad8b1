"""Turn examples into rectangular batches of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from crosstune.data.token_batch import IGNORED, Example, TokenBatch

# Rows are padded to a multiple of this, so that compiled and cached kernels see few shapes.
LENGTH_STEP = 8


def pad_rows(examples: Sequence[Example], *, pad_id: int) -> TokenBatch:
    """Make one row per example, padded on the right to the longest."""
    longest = max(len(example.tokens) for example in examples)
    width = -(-longest // LENGTH_STEP) * LENGTH_STEP
    shape = (len(examples), width)
    input_ids = np.full(shape, pad_id, dtype=np.int32)
    targets = np.full(shape, IGNORED, dtype=np.int32)
    segments = np.zeros(shape, dtype=np.int32)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        input_ids[row, :length] = example.tokens
        targets[row, : length - 1] = np.where(example.supervised[1:], example.tokens[1:], IGNORED)
        segments[row, :length] = 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), shape).copy()
    return TokenBatch(input_ids=input_ids, targets=targets, segments=segments, positions=positions)


def pack_rows(rows: Sequence[Sequence[Example]], *, pad_id: int) -> TokenBatch:
    """Make rows of several examples each. Positions restart at each example and at the padding."""
    longest = max(sum(len(example.tokens) for example in row) for row in rows)
    width = -(-longest // LENGTH_STEP) * LENGTH_STEP
    shape = (len(rows), width)
    input_ids = np.full(shape, pad_id, dtype=np.int32)
    targets = np.full(shape, IGNORED, dtype=np.int32)
    segments = np.zeros(shape, dtype=np.int32)
    positions = np.zeros(shape, dtype=np.int32)
    for number, row in enumerate(rows):
        start = 0
        for segment, example in enumerate(row, start=1):
            end = start + len(example.tokens)
            input_ids[number, start:end] = example.tokens
            targets[number, start : end - 1] = np.where(example.supervised[1:], example.tokens[1:], IGNORED)
            segments[number, start:end] = segment
            positions[number, start:end] = np.arange(end - start)
            start = end
        positions[number, start:] = np.arange(width - start)
    return TokenBatch(input_ids=input_ids, targets=targets, segments=segments, positions=positions)


def split_packed(rows: Sequence[Sequence[Example]], *, batch_size: int, pad_id: int) -> Iterator[TokenBatch]:
    for start in range(0, len(rows), batch_size):
        yield pack_rows(rows[start : start + batch_size], pad_id=pad_id)


def split_rows(examples: Sequence[Example], *, batch_size: int, pad_id: int) -> Iterator[TokenBatch]:
    for start in range(0, len(examples), batch_size):
        yield pad_rows(examples[start : start + batch_size], pad_id=pad_id)


def num_supervised(example: Example) -> int:
    """Return the number of tokens with loss. The first token of a row is never predicted."""
    return int(example.supervised[1:].sum())
