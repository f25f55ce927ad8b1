"""The work of lora_gpu.py and lora_cpu.py: model folders, batches, and the number of operations that a step needs."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.data.batches.token_batch import IGNORED, TokenBatch
from crosstune.files.json_files import write_json
from crosstune.models.llama_layout import Llama
from crosstune.models.tiny import TINY, tiny_model

MEAN_SHORT = 250


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama-shaped model and the rows of a step."""

    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab: int
    rows: int = 4
    context: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def num_linear(self) -> int:
        """Weights of the linear layers, without embedding and head."""
        attention = self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    def flops_per_token(self, *, rank: int) -> float:
        """The operations of a step: forward and input gradient of the frozen weights and the head, attention, adapters."""
        attention = 3.5 * 2 * self.context * self.num_heads * self.head_dim * self.num_layers
        frozen = 4 * (self.num_linear + self.hidden * self.vocab)
        return frozen + attention + self.adapter_flops_per_token(rank=rank)

    def full_flops_per_token(self) -> float:
        """The operations of a step that trains all weights."""
        attention = 3.5 * 2 * self.context * self.num_heads * self.head_dim * self.num_layers
        return 6 * (self.num_linear + self.hidden * self.vocab) + attention

    def adapter_flops_per_token(self, *, rank: int) -> float:
        inputs = 2 * self.hidden + self.num_heads * self.head_dim
        outputs = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + 2 * self.hidden
        widths = inputs + outputs + self.hidden + 3 * self.intermediate + 2 * self.hidden
        return 6 * rank * widths * self.num_layers


SHAPES = {
    "7b": Shape(hidden=4096, intermediate=11008, num_layers=32, num_heads=32, num_kv_heads=32, vocab=32000),
    "8b": Shape(hidden=4096, intermediate=14336, num_layers=32, num_heads=32, num_kv_heads=8, vocab=128256),
    "0.5b": Shape(hidden=896, intermediate=4864, num_layers=24, num_heads=14, num_kv_heads=2, vocab=151936),
    "1.2b": Shape(
        hidden=2048,
        intermediate=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        vocab=128256,
        context=1024,
    ),
    "135m": Shape(
        hidden=576,
        intermediate=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        vocab=49152,
        context=256,
    ),
    "smoke": Shape(
        hidden=64, intermediate=128, num_layers=2, num_heads=4, num_kv_heads=2, vocab=512, rows=2, context=32
    ),
}


def write_model(folder: Path, shape: Shape, *, dtype: str) -> Path:
    """Write a model folder with random weights once; all tensors are slices of one block of random numbers."""
    done = folder / "written"
    if done.exists():
        return folder
    tiny_model(folder)
    llama: Llama = replace(
        TINY,
        vocab=shape.vocab,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        max_context=2 * shape.context,
    )
    write_json(folder / "config.json", llama.config())
    half = dtype == "bfloat16"
    drawn = np.random.default_rng(0).standard_normal(2**22, dtype=np.float32) * np.float32(0.02)
    numbers = (drawn.view(np.uint32) >> 16).astype(np.uint16) if half else drawn
    one = np.uint16(0x3F80) if half else np.float32(1.0)
    shapes = llama.tensor_shapes()
    block = np.resize(numbers, max(int(np.prod(size)) for size in shapes.values()) + 2**16)
    entries: dict[str, Any] = {}
    end = 0
    for name, size in shapes.items():
        start, end = end, end + block.itemsize * int(np.prod(size))
        kind = "BF16" if half else "F32"
        entries[name] = {"dtype": kind, "shape": list(size), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for number, (name, size) in enumerate(shapes.items()):
            count, first = int(np.prod(size)), 37 * number % 2**16
            values = np.full(count, one) if name.endswith("norm.weight") else block[first : first + count]
            file.write(values.tobytes())
    done.touch()
    return folder


def draw_rows(shape: Shape) -> list[np.ndarray]:
    """Return full rows of random tokens."""
    draw = np.random.default_rng(1)
    return [draw.integers(3, shape.vocab, shape.context).astype(np.int32) for _ in range(shape.rows)]


def draw_short(shape: Shape, count: int = 64) -> list[np.ndarray]:
    """Return examples of very different lengths, as in instruction data."""
    draw = np.random.default_rng(2)
    lengths = draw.lognormal(np.log(MEAN_SHORT * shape.context / 2048) - 0.32, 0.8, count)
    lengths = np.clip(lengths, 4, shape.context).astype(int)
    return [draw.integers(3, shape.vocab, length).astype(np.int32) for length in lengths]


def pad(examples: list[np.ndarray]) -> TokenBatch:
    """Return one example per row; every token but the first is supervised."""
    length = max(len(example) for example in examples)
    batch = _empty(len(examples), length)
    for row, example in enumerate(examples):
        _put(batch, row, 0, example, document=1)
    return batch


def pack(examples: list[np.ndarray], *, rows: int, context: int) -> list[TokenBatch]:
    """Return batches of packed rows, each example in the first row that has room for it."""
    bins: list[list[np.ndarray]] = []
    for example in sorted(examples, key=len, reverse=True):
        for found in bins:
            if sum(map(len, found)) + len(example) <= context:
                found.append(example)
                break
        else:
            bins.append([example])
    batches = []
    for first in range(0, len(bins), rows):
        batch = _empty(len(bins[first : first + rows]), context)
        for row, found in enumerate(bins[first : first + rows]):
            start = 0
            for document, example in enumerate(found, start=1):
                _put(batch, row, start, example, document=document)
                start += len(example)
            rest = context - start  # padding counts from 0, as a separate document without targets
            batch.positions[row, start:] = np.arange(rest)
        batches.append(batch)
    return batches


def _empty(rows: int, length: int) -> TokenBatch:
    zeros = [np.zeros((rows, length), np.int32) for _ in range(2)]
    return TokenBatch(
        input_ids=zeros[0],
        targets=np.full((rows, length), IGNORED, np.int32),
        segments=zeros[1],
        positions=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
    )


def _put(batch: TokenBatch, row: int, start: int, example: np.ndarray, *, document: int) -> None:
    place = slice(start, start + len(example))
    batch.input_ids[row, place] = example
    batch.targets[row, start : start + len(example) - 1] = example[1:]
    batch.segments[row, place] = document
    batch.positions[row, place] = np.arange(len(example))
