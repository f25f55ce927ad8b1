"""Predict the memory of a training step from its allocations, and the memory that a device offers.

Memory can peak at the loss, in the backward pass of a layer, when all gradients exist, and in the update. The terms count
the tensors of a Llama-like model in the torch engine; other models are similar.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from crosstune.core.backend import BackendSpec
from crosstune.estimate import fast_layers
from crosstune.estimate.fast_layers import Recompute, stream_bytes
from crosstune.estimate.machine import BackendReport, Machine
from crosstune.estimate.model_shape import (
    ATTENTION_LINEARS,
    ModelShape,
    Step,
    adapted_linears,
    block_parameters,
    trained_parameters,
)

GIB = 1024**3
SURELY_TOO_MUCH = 1.25
"""A step surely does not fit if its estimate exceeds the usable memory by this factor: estimates are more accurate than that."""
LOGITS_AT_A_TIME = 2**24
"""More logits than this are converted to fp32 in parts."""
UNIFIED_SHARE = 0.9
"""The largest fraction of unified memory for a GPU."""
EXPERTS_AT_ONCE_BYTES = 2**30
"""Quantized experts of a layer are dequantized at once on a GPU up to this size: larger parts save no time, and smaller
ones wait for the number of rows of each expert."""
_SCORE_COPIES = 2
"""Temporary copies of a layer's attention scores in its backward pass."""
_PRODUCT_COPIES = {"none": 0, "bnb": 1, "mxfp4": 1, "mlx": 0}
"""Dense copies of a quantized weight during a matmul; MLX multiplies packed bits. Other quantizers need three."""


@dataclass(frozen=True, kw_only=True)
class MemoryParts:
    """The memory of a step at its largest moment, in bytes."""

    weights: int
    adapters: int
    """Adapters, fp32 copies of trained 16-bit weights, and the trained weights of a reference."""
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    """Gathered shards, dense copies of quantized weights, and temporary gradients."""
    overhead: int
    teacher: int = 0
    """A second model, as far as it needs more memory than it leaves to a step."""

    @property
    def total(self) -> int:
        return sum(self.to_json().values())

    def to_json(self) -> dict[str, int]:
        return {name: int(getattr(self, name)) for name in MemoryParts.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A step with its memory."""

    shape: ModelShape
    step: Step
    parts: MemoryParts
    estimated_bytes: int
    """The sum of the parts, corrected by earlier runs."""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The ratio of measured to predicted peak memory in earlier runs."""

    factor: float
    num_runs: int


def step_bytes(shape: ModelShape, step: Step) -> int:
    return step_parts(shape, step).total


def surely_too_large(estimated: int, usable: int) -> bool:
    """Return whether an estimate exceeds the memory by so much that the step surely does not fit."""
    return estimated > SURELY_TOO_MUCH * usable


def step_parts(shape: ModelShape, step: Step) -> MemoryParts:
    """Return the peak memory of a step in each process, by part."""
    trained = trained_parameters(shape, step)
    shards = step.num_shards
    if step.fast:
        at_loss, in_backward = fast_layers.activation_bytes(shape, step, fast_modes(shape, step))
        loss, backward = fast_layers.loss_bytes(shape, step), fast_layers.backward_bytes(shape, step)
        has_own_kernel = step.fp8_products or (step.quantizer == "bnb" and step.on_gpu)
        dense = 0 if has_own_kernel else dense_copies(shape, step)
        held = _fast_held(shape, step)
    else:
        at_loss = kept_bytes(shape, step)
        in_backward = at_loss + (layer_bytes(shape, step) if step.checkpointing else 0)
        loss, backward = loss_bytes(shape, step), backward_bytes(shape, step)
        dense, held = dense_copies(shape, step) + gathered_bytes(shape, step), 0
    tower, patches = shape.tower, step.batch * step.patches
    reading = 0
    if tower is not None and patches:
        reading = tower.forward_bytes(patches, width=step.width)
        held += tower.input_bytes(patches)
        if step.trains_tower:
            kept = tower.kept_bytes(patches, width=step.width, checkpointing=step.checkpointing)
            at_loss, in_backward = at_loss + kept, in_backward + kept
    if step.compares_logits:
        loss = _compared_bytes(shape, step)
    before = 4 * trained // shards if step.num_micro_batches > 1 else 0
    # A 16-bit weight and its fp32 copy each have a gradient.
    own = 2 if _is_trained_in_16_bits(step) else 0
    after = (own + 4 if own and step.num_micro_batches > 1 else 4) * trained // shards
    in_update = 4 * trained // shards * (2 if step.on_gpu and "fused" not in step.optimizer else 1)
    moments = [
        (before, 0, 0, reading + held),
        (before, at_loss, loss, held),
        (before, in_backward, 0, backward + dense + held),
        (after, at_loss // shape.num_layers, 0, dense + held),
        (4 * trained // shards, 0, 0, in_update - 4 * trained // shards + held),
    ]
    gradients, activations, logits, buffers = max(moments, key=sum)
    optimizer = (moment_bytes(trained, step.optimizer) + 4 * trained * step.averages) // shards
    in_step = gradients + activations + logits + buffers + optimizer
    return MemoryParts(
        weights=weight_bytes(shape, step) // shards,
        adapters=(copy_bytes(step, trained) + reference_bytes(step, trained)) // shards,
        teacher=step.teacher_bytes if step.teacher_stays else max(0, step.teacher_bytes - in_step),
        gradients=gradients,
        optimizer=optimizer,
        activations=0 if step.offloads_activations and not step.fast else activations,
        logits=logits,
        buffers=buffers,
        overhead=step.overhead_bytes,
    )


def num_recomputed(shape: ModelShape, step: Step) -> int:
    """Return the number of layers that are recomputed in the backward pass."""
    if step.fast:
        return fast_modes(shape, step).count("full")
    return shape.num_layers if step.checkpointing else 0


def fast_modes(shape: ModelShape, step: Step) -> list[Recompute]:
    """Return the recomputation of each fast layer."""
    held = weight_bytes(shape, step) + copy_bytes(step, trained_parameters(shape, step)) + step.overhead_bytes
    return fast_layers.recomputation(
        shape,
        step,
        held_bytes=held + _fast_held(shape, step),
        working_bytes=fast_working_bytes(shape, step),
    )


def _fast_held(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the fast layers' buffers and copies that persist between steps."""
    return fast_layers.adapter_copy_bytes(shape, step) + fast_layers.weight_buffer_bytes(shape, step)


def fast_working_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of a step with the fast layers without weights, adapters and kept activations."""
    trained = trained_parameters(shape, step)
    passing = max(fast_layers.backward_bytes(shape, step), fast_layers.loss_bytes(shape, step))
    teacher = step.teacher_bytes if step.teacher_stays else 0
    return (
        4 * trained + moment_bytes(trained, step.optimizer) + 4 * trained * step.averages + passing + teacher
    )


def weight_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the weights. Embedding, head and new blocks are never quantized; under autocast, frozen linear
    weights have the compute dtype."""
    new = step.num_new_blocks * block_parameters(shape) if step.method == "llama_pro" else 0
    linear = max(0, shape.language_parameters - shape.embeddings - new)
    dense = step.weight_bits // 8
    if step.num_shards > 1 and step.method in ("full", "llama_pro"):
        # The shards of trained weights are stored in fp32, and gathered in 16 bits.
        new, dense = (0, 4) if step.method == "full" else (new * 4 // dense, dense)
    cast = min(dense, step.width) if step.method in ("lora", "dora") else dense
    vision = (shape.num_parameters - shape.language_parameters) * cast  # never quantized
    if step.quantizer != "none":
        return vision + (shape.embeddings + new) * dense + int(linear * _stored_bits(step) / 8)
    return vision + (shape.embeddings + new) * dense + linear * cast


def _stored_bits(step: Step) -> float:
    """Return the bits of a quantized weight, including scales."""
    if step.n_bits >= 8:
        return step.n_bits + 0.02  # a scale per row
    if step.quantizer == "bnb":
        per_group = 8 + 32 / 256 if step.double_quant else 32
        return step.n_bits + per_group / step.group_size
    return step.n_bits + 32 / step.group_size  # a scale and a zero point of 16 bits each


def copy_bytes(step: Step, trained: int) -> int:
    """Return the bytes of fp32 adapters, or of fp32 copies of trained 16-bit weights."""
    return 4 * trained if step.method in ("lora", "dora") or _is_trained_in_16_bits(step) else 0


def _is_trained_in_16_bits(step: Step) -> bool:
    """Return True if trained 16-bit weights have fp32 copies; shards are stored in fp32 alone."""
    return step.method in ("full", "llama_pro") and step.weight_bits == 16 and step.num_shards == 1


def reference_bytes(step: Step, trained: int) -> int:
    """Return the bytes of the copy of the initial trained weights, if one is kept."""
    if not step.copies_trained:
        return 0
    return trained * (4 if step.method in ("lora", "dora") else step.weight_bits // 8)


def moment_bytes(trained: int, optimizer: str) -> int:
    """Return the bytes of the optimizer's state."""
    if optimizer.endswith("_8bit"):
        num_moments = 1 if optimizer.startswith("lion") else 2
        return int(trained * num_moments * (1 + 4 / 256))  # a byte each, and a scale per 256
    return {"sgd": 0, "adafactor": trained // 64, "lion": 4 * trained}.get(optimizer, 8 * trained)


def kept_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes that all layers keep for the backward pass."""
    if step.checkpointing:
        layers = shape.num_layers * step.tokens * shape.hidden * stream_bytes(step)
    else:
        layers = shape.num_layers * layer_bytes(shape, step)
    casts = step.method == "full" and stream_bytes(step) > step.width
    # The last norm, the input of the head, and the weights that autocast keeps after casting them.
    return layers + step.tokens * shape.hidden * (4 + step.width) + casts * shape.num_parameters * step.width


def layer_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes that one layer keeps for its backward pass."""
    width, wide = step.width, shape.active_intermediate
    norms = 2 * 4 * shape.hidden  # their inputs in fp32
    if step.method in ("full", "llama_pro"):
        norms += 2 * width * shape.hidden  # the normalized values, for the gradient of the norm's weight
    attention = width * (2 * shape.queries + 2 * shape.keys) + 4 * shape.num_heads
    mlp = 2 * wide + shape.hidden if has_stacks(shape, step) else 3 * wide
    per_token = norms + attention + width * mlp + _input_width(shape, step) + _adapter_width(shape, step)
    scores = step.row_parts * step.context * shape.num_heads * step.score_bits // 8
    if step.row_parts > 1:  # the keys and values of the other ranks, for every head
        per_token += 2 * width * step.row_parts * shape.queries
    return step.tokens * (per_token + scores)


def _input_width(shape: ModelShape, step: Step) -> int:
    """Return the bytes per token of the kept inputs of trained or adapted linear layers. Layers share an input unless each
    applies its own dropout or cast; attention keeps the input of o_proj."""
    full = step.method in ("full", "llama_pro")
    used = shape.linears() if full else _single_linears(shape, step)
    sizes = {name: _times(shape, name) * inputs * step.width for name, (_, inputs, _) in used.items()}
    if step.dropout and not full:
        mask = 1 if step.on_gpu else step.width
        return sum(size + size // step.width * mask for size in sizes.values())
    sizes.pop("o_proj", None)
    if step.weight_bits > step.compute_bits:
        return sum(sizes.values())
    shared = [sizes.get(name, 0) for name in ("q_proj", "k_proj", "v_proj")]
    return max(shared) + max(sizes.get("gate_proj", 0), sizes.get("up_proj", 0)) + sizes.get("down_proj", 0)


def _adapter_width(shape: ModelShape, step: Step) -> int:
    """Return the bytes per token that adapters keep, without the inputs of their layers."""
    total = 0
    for name, (outputs, _, _) in _single_linears(shape, step).items():
        kept = step.rank + (outputs if step.method == "dora" else 0)  # DoRA: the output before it is rescaled
        total += _times(shape, name) * step.width * kept
    return total


def has_stacks(shape: ModelShape, step: Step) -> bool:
    """Return whether the experts of a layer are one operation, which keeps its input and the output of gate and up."""
    adapted = adapted_linears(shape, step).keys() - set(ATTENTION_LINEARS)
    return shape.num_experts > 1 and step.method == "lora" and (step.quantizer != "none" or bool(adapted))


def _single_linears(shape: ModelShape, step: Step) -> dict[str, tuple[int, int, int]]:
    """Return the adapted linear layers outside of such an operation."""
    found, inside = adapted_linears(shape, step), has_stacks(shape, step)
    return {name: sizes for name, sizes in found.items() if not inside or name in ATTENTION_LINEARS}


def _times(shape: ModelShape, name: str) -> int:
    """Return the number of layers of this name that process a token in a block."""
    return 1 if name in ATTENTION_LINEARS or shape.num_experts == 1 else shape.experts_per_token


def backward_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of temporary gradients in a layer's backward pass, at its MLP."""
    scores = step.context * shape.num_heads * step.score_bits // 8 * _SCORE_COPIES
    rows = (
        shape.experts_per_token if has_stacks(shape, step) else 0
    )  # of a token, each with a gradient and a copy
    values = step.width * ((2 + 3 * rows) * shape.hidden + 2 * shape.active_intermediate)
    return step.tokens * (values + scores)


def loss_bytes(shape: ModelShape, step: Step) -> int:
    """Return the peak bytes of logits and their gradients: all in fp32, or in parts with a gradient in the compute dtype."""
    rows = step.batch * min(step.context, step.supervised or step.context)
    count = rows * shape.vocab
    if count <= LOGITS_AT_A_TIME:
        return 12 * count
    return 2 * count * step.width + (2 if step.width == 4 else 3) * 4 * LOGITS_AT_A_TIME


def _compared_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the logits of two models, their log probabilities and temporaries, for a chunk of tokens."""
    count = step.batch * min(step.context, step.supervised or step.context) * shape.vocab
    return 10 * 4 * min(count, LOGITS_AT_A_TIME)


def teacher_bytes(teacher: ModelShape, step: Step, *, bits: int | None) -> int:
    """Return the bytes of a teacher with weights of `bits`, None for the compute dtype, and of its forward pass."""
    own = replace(
        step, method="lora", quantizer="bnb" if bits else "none", n_bits=bits or 16, weight_bits=step.compute_bits, num_new_blocks=0
    )  # fmt: skip
    passing = step.tokens * step.width * (4 * teacher.hidden + 3 * teacher.active_intermediate)
    return weight_bytes(teacher, own) + passing


def dense_copies(shape: ModelShape, step: Step) -> int:
    """Return the bytes of dense copies of the largest weight during a matmul."""
    largest = max(outputs * inputs for outputs, inputs, _ in shape.linears().values())
    if has_stacks(shape, step):
        pair = 2 * shape.expert_intermediate * shape.hidden
        at_once = EXPERTS_AT_ONCE_BYTES // step.width if step.on_gpu else pair
        largest = max(pair, min(at_once, shape.num_experts * pair))
    copies = _PRODUCT_COPIES.get(step.quantizer, 3) * largest * step.width
    norms = 3 * 4 * largest if step.method == "dora" else 0  # the row norms of W + BA, in fp32
    return copies + norms


def gathered_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of gathered shards: two blocks, embedding and head; with gradients if they are trained."""
    if step.num_shards == 1:
        return 0
    gradient = 4 if step.method == "full" else 0
    stored = _stored_bits(step) / 8 if step.quantizer != "none" else step.width
    block = 2 * block_parameters(shape) * (stored + gradient)
    return int(block + shape.embeddings * (step.width + gradient))


def largest_batch(shape: ModelShape, step: Step, *, limit_bytes: int, at_most: int = 1024) -> int:
    """Return the largest power of two of rows that fits; 0 when one row does not fit."""
    batch, candidate = 0, 1
    while candidate <= at_most and step_bytes(shape, replace(step, batch=candidate)) <= limit_bytes:
        batch, candidate = candidate, candidate * 2
    return batch


def describe_parts(parts: MemoryParts) -> Mapping[str, int]:
    """Return the non-empty parts, largest first."""
    return dict(sorted(((n, b) for n, b in parts.to_json().items() if b), key=lambda item: -item[1]))


def usable_bytes(
    machine: Machine, report: BackendReport, spec: BackendSpec, *, environment: Mapping[str, str]
) -> int:
    """Return the bytes that a training step may use on a device, under these environment variables."""
    share = spec.usable_share(environment)
    device = report.memory_total_bytes
    if not report.unified_memory or not device:
        return int(device * (spec.memory_share if share is None else share))
    most = int(max(device, machine.memory_total_bytes) * UNIFIED_SHARE)
    return most if share is None else min(int(device * share), most)
