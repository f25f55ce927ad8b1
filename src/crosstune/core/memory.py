"""Estimate the memory of a training step from the shape of the model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

GIB = 1024**3
_SCORE_COPIES = 2
"""Copies of a layer's attention scores during its backward pass, besides the one kept from the forward pass."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder model that its memory depends on."""

    num_parameters: int
    hidden: int
    num_layers: int
    intermediate: int
    vocab: int
    num_heads: int
    max_context: int | None = None
    source: str = "config"
    """The source of the sizes: `config`, or `name` for a guess from the model's name."""
    num_experts: int = 1
    """Experts of each layer in a mixture."""
    expert_intermediate: int = 0
    """The width of each of several experts."""


# (billions of parameters, hidden, layers, intermediate, vocabulary, heads) of common decoder models.
_TYPICAL = (
    (0.135, 576, 30, 1536, 49152, 9),
    (0.5, 896, 24, 4864, 151936, 14),
    (1.1, 2048, 22, 5632, 32000, 32),
    (3.0, 3072, 28, 8192, 128256, 24),
    (7.0, 4096, 32, 11008, 32000, 32),
    (13.0, 5120, 40, 13824, 32000, 40),
    (34.0, 7168, 60, 20480, 64000, 56),
    (70.0, 8192, 80, 28672, 32000, 64),
)


def shape_from_name(name: str) -> ModelShape | None:
    """Guess the shape from the size in a model's name, such as 7b or 135M; return None when it has none."""
    match = re.search(r"(?<![A-Za-z0-9])(\d+(?:\.\d+)?)\s*([bBmM])(?![A-Za-z0-9])", name)
    if match is None:
        return None
    billions = float(match.group(1)) * (1.0 if match.group(2) in "bB" else 1e-3)
    return shape_for_size(billions)


def shape_for_size(billions: float) -> ModelShape:
    _, hidden, layers, intermediate, vocab, heads = min(_TYPICAL, key=lambda row: abs(row[0] - billions))
    return ModelShape(
        num_parameters=round(billions * 1e9),
        hidden=hidden,
        num_layers=layers,
        intermediate=intermediate,
        vocab=vocab,
        num_heads=heads,
        source="name",
    )


def block_parameters(shape: ModelShape) -> int:
    """Return the parameters of one decoder block: all except the embedding, divided by the number of blocks."""
    return (shape.num_parameters - shape.vocab * shape.hidden) // shape.num_layers


def expand_shape(shape: ModelShape, num_blocks: int) -> ModelShape:
    """Return the shape of the model with this many more blocks."""
    return replace(
        shape,
        num_layers=shape.num_layers + num_blocks,
        num_parameters=shape.num_parameters + num_blocks * block_parameters(shape),
    )


def model_bytes(shape: ModelShape, *, method: str, bits: int, rank: int, num_new_blocks: int = 0) -> int:
    """Return the bytes of weights, gradients and optimizer moments.

    `num_new_blocks` of the blocks in `shape` were added by llama_pro; they are trained in full and never quantized.
    """
    new = num_new_blocks * block_parameters(shape)
    weights = shape.num_parameters * bits // 8
    if bits < 16:
        # Embeddings, head and new blocks stay in 16 bits; a scale per 64 weights adds half a bit to the others.
        kept = shape.vocab * shape.hidden + new
        weights = kept * 2 + (shape.num_parameters - kept) * (2 * bits + 1) // 16
    if method == "full":
        trained = shape.num_parameters
    elif method == "llama_pro":
        trained = new
    else:
        per_layer = 4 * 2 * shape.hidden
        if shape.num_experts > 1:  # gate and up share one A
            per_layer += shape.num_experts * (2 * shape.hidden + 3 * shape.expert_intermediate)
        else:
            per_layer += 3 * (shape.hidden + shape.intermediate)
        trained = rank * per_layer * shape.num_layers
    return weights + trained * 16  # fp32 master, gradient and two moments


def gathered_bytes(shape: ModelShape, *, method: str, bits: int) -> int:
    """Return the bytes of the weights that a process gathers from the others: two blocks at a time, and the embedding and
    the head; of those that are trained, the gradients too."""
    block, rest = block_parameters(shape), 2 * shape.vocab * shape.hidden
    per_weight = bits / 8 + (4 if method == "full" else 0)
    return int(2 * block * per_weight + rest * (max(bits, 16) / 8 + (4 if method == "full" else 0)))


def activation_bytes(
    shape: ModelShape, *, batch: int, context: int, checkpointing: bool, compute_bits: int, score_bits: int
) -> int:
    """Return the bytes of the activations kept for the backward pass, and of the logits, of one micro-batch."""
    tokens = batch * context
    width = compute_bits // 8
    per_layer = tokens * (10 * shape.hidden + 4 * shape.intermediate) * width
    if checkpointing:
        kept = shape.num_layers * tokens * shape.hidden * width + per_layer
    else:
        kept = shape.num_layers * per_layer
    scores = tokens * context * shape.num_heads * score_bits // 8
    kept += scores * (_SCORE_COPIES + (1 if checkpointing else shape.num_layers))
    return kept + 2 * tokens * shape.vocab * 4


def step_bytes(
    shape: ModelShape,
    *,
    method: str,
    bits: int,
    rank: int,
    batch: int,
    context: int,
    checkpointing: bool,
    compute_bits: int,
    score_bits: int,
    num_new_blocks: int = 0,
    num_shards: int = 1,
) -> int:
    """Return the bytes of a whole training step, in each of `num_shards` processes that divide the weights."""
    model = model_bytes(shape, method=method, bits=bits, rank=rank, num_new_blocks=num_new_blocks)
    if num_shards > 1:
        model = model // num_shards + gathered_bytes(shape, method=method, bits=bits)
    return model + activation_bytes(
        shape,
        batch=batch,
        context=context,
        checkpointing=checkpointing,
        compute_bits=compute_bits,
        score_bits=score_bits,
    )


def largest_batch(
    shape: ModelShape,
    *,
    limit_bytes: int,
    score_bits: int,
    method: str = "lora",
    bits: int = 16,
    rank: int = 16,
    context: int = 2048,
    checkpointing: bool = True,
    compute_bits: int = 16,
    at_most: int = 1024,
) -> int:
    """Return the largest power of two of rows that is estimated to fit; 0 when one row does not fit."""
    batch = 0
    candidate = 1
    while candidate <= at_most:
        need = step_bytes(
            shape,
            method=method,
            bits=bits,
            rank=rank,
            batch=candidate,
            context=context,
            checkpointing=checkpointing,
            compute_bits=compute_bits,
            score_bits=score_bits,
        )
        if need > limit_bytes:
            break
        batch, candidate = candidate, candidate * 2
    return batch
