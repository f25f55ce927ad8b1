"""Collate examples into rectangular batches of numpy arrays, padded or packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from crosstune.data.read.pictures import Picture

IGNORED = -100
"""The target of a position without loss."""

LENGTH_STEP = 8
"""Rows are padded to a multiple of this, so that compiled and cached kernels see few shapes."""

# Separates these random streams from the streams of the data order, which have the same seed.
_NOISE_KEY = 2**41

CHANNEL, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
"""Factors of the hash: key + channel * CHANNEL, then the finalizer of MurmurHash3, all modulo 2**32."""

IntArray = NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized document. `supervised[i]` is true if token i carries loss."""

    tokens: IntArray
    supervised: NDArray[np.bool_]
    index: int
    """The index of its row in the dataset."""
    pictures: Sequence[Picture] = ()


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Rows of equal length. Targets are shifted: position t predicts `targets[:, t]`."""

    input_ids: IntArray
    targets: IntArray
    segments: IntArray
    """0 for padding, otherwise the number of the document in its row, counted from 1."""
    positions: IntArray
    noise_keys: NDArray[np.uint32] | None = None
    """Only with --neftune_alpha, for training: see `add_noise`."""
    noise_scales: NDArray[np.float32] | None = None
    pictures: Sequence[Picture] = ()
    """The pictures of the rows, in the order of their tokens."""

    @property
    def num_tokens(self) -> int:
        return int((self.segments > 0).sum())

    @property
    def weight(self) -> int:
        """The number of supervised tokens."""
        return int((self.targets != IGNORED).sum())

    @property
    def is_packed(self) -> bool:
        """True if a row contains more than one document."""
        return bool(self.segments.max() > 1)

    @property
    def has_padding(self) -> bool:
        return bool((self.segments == 0).any())

    def document_numbers(self) -> IntArray:
        """Return a number for each token that differs between rows and documents, in their order."""
        rows = np.arange(len(self.segments), dtype=np.int32)[:, None]
        return rows * (int(self.segments.max()) + 1) + self.segments


def number_answers(batch: TokenBatch) -> NDArray[np.int64]:
    """Number the documents with supervised tokens; return the number for each supervised token, row by row."""
    row, column = (batch.targets != IGNORED).nonzero()
    document = batch.document_numbers()[row, column]
    return (np.diff(document, prepend=-1) != 0).cumsum(dtype=np.int64) - 1


def without_padding(batch: TokenBatch) -> TokenBatch:
    """Return all documents of a batch in one row, in the same order and with the same targets."""
    real = batch.segments > 0
    starts = np.ones_like(real)
    starts[:, 1:] = batch.segments[:, 1:] != batch.segments[:, :-1]
    flat = {
        name: values[real][None]
        for name, values in vars(batch).items()
        if isinstance(values, np.ndarray) and values.shape == real.shape
    }
    return replace(batch, **(flat | {"segments": starts[real].cumsum(dtype=np.int32)[None]}))


def pad_rows(examples: Sequence[Example], *, pad_id: int) -> TokenBatch:
    """Make one row per example, padded on the right to the longest."""
    batch = pack_rows([[example] for example in examples], pad_id=pad_id)
    positions = np.arange(batch.input_ids.shape[1], dtype=np.int32)
    return replace(batch, positions=np.broadcast_to(positions, batch.input_ids.shape).copy())


def pack_rows(rows: Sequence[Sequence[Example]], *, pad_id: int) -> TokenBatch:
    """Make rows of multiple examples each. Positions restart at each example and at the padding."""
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
    pictures = [picture for row in rows for example in row for picture in example.pictures]
    return TokenBatch(
        input_ids=input_ids, targets=targets, segments=segments, positions=positions, pictures=pictures
    )


def split_rows(examples: Sequence[Example], *, batch_size: int, pad_id: int) -> Iterator[TokenBatch]:
    for start in range(0, len(examples), batch_size):
        yield pad_rows(examples[start : start + batch_size], pad_id=pad_id)


def add_noise(batches: Sequence[TokenBatch], *, alpha: float, seed: int, step: int) -> list[TokenBatch]:
    """Return the micro-batches of a step with keys and scales. Noise of a document of n tokens is within alpha / sqrt(n),
    divided by the root of the number of channels (NEFTune, Jain et al. 2023).

    The engines hash the key with the channel into a number between -1 and 1. A key depends only on the seed, the step and the
    token's row and column, so the noise is the same after a resume, at any batch size and world size, and on both engines.
    """
    found, row = [], 0
    for batch in batches:
        keys, scales = np.zeros(batch.segments.shape, np.uint32), np.zeros(batch.segments.shape, np.float32)
        for number, segments in enumerate(batch.segments):
            generator = np.random.Philox(key=(seed, _NOISE_KEY + step), counter=(0, 0, row, 0))
            keys[number] = generator.random_raw(len(segments)) >> 32
            lengths = np.bincount(segments)[segments]
            scales[number] = np.where(segments > 0, alpha / np.sqrt(lengths), 0.0)
            row += 1
        found.append(replace(batch, noise_keys=keys, noise_scales=scales))
    return found
