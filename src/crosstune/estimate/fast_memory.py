"""Predict the memory of the fast layers: activations, temporary gradients, logits, copies of adapters, and buffers for
quantized weights."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.estimate.fast_layers import (
    LOGITS_IN_CACHE,
    MOST_COLUMNS,
    POST_NORM_FAMILIES,
    QK_NORM_FAMILIES,
    FastLayer,
    Recompute,
    adapter_columns,
    attention_bytes,
    kept_by,
    most_held,
    plan_recomputation,
    rows_at_a_time,
)
from crosstune.estimate.model_shape import ModelShape, Step, adapted_linears

_GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Layers that share an input and are multiplied at once."""
_STORED_IN_FP8 = "fp8"


@dataclass(frozen=True, kw_only=True)
class Group:
    """The sizes of a group of linear layers and its adapters."""

    outputs: int
    inputs: int
    adapted_outputs: int
    columns: int


def groups(shape: ModelShape, step: Step) -> dict[str, Group]:
    linears, adapted = shape.linears(), adapted_linears(shape, step)
    return {
        name: Group(
            outputs=sum(linears[layer][0] for layer in layers),
            inputs=linears[layers[0]][1],
            adapted_outputs=sum(adapted[layer][0] for layer in layers if layer in adapted),
            columns=adapter_columns(
                step.rank * sum(layer in adapted for layer in layers), on_gpu=step.on_gpu
            ),
        )
        for name, layers in _GROUPS.items()
    }


def fast_layer(shape: ModelShape, step: Step) -> FastLayer:
    columns = {f"{name}_columns": group.columns for name, group in groups(shape, step).items()}
    return FastLayer(
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        queries=shape.queries,
        keys=shape.keys,
        num_heads=shape.num_heads,
        compute_bytes=step.width,
        stream_bytes=stream_bytes(step),
        attention_bytes=attention_bytes(step.context, compute_bytes=step.width, on_gpu=step.on_gpu),
        qk_norms=shape.family in QK_NORM_FAMILIES,
        post_norms=shape.family in POST_NORM_FAMILIES,
        **columns,
    )


def stream_bytes(step: Step) -> int:
    """Return the bytes of a number of the residual stream, which has the embedding's dtype."""
    return max(step.width, step.weight_bits // 8)


def recomputation(shape: ModelShape, step: Step, *, held_bytes: int, working_bytes: int) -> list[Recompute]:
    """Return the recomputation of each layer beside `held_bytes` of weights, as the engine chooses it."""
    if step.checkpointing:
        return ["full"] * shape.num_layers
    if not step.recomputes_by_memory:
        return ["lean"] * shape.num_layers
    if not step.limit_bytes:
        return ["none"] * shape.num_layers
    return plan_recomputation(
        fast_layer(shape, step).kept(),
        num_layers=shape.num_layers,
        num_tokens=step.tokens,
        free_bytes=max(0, step.limit_bytes - held_bytes),
        working_bytes=working_bytes,
    )


def activation_bytes(shape: ModelShape, step: Step, modes: list[Recompute]) -> tuple[int, int]:
    """Return the activations kept at the loss, including the input of the last norm, and their peak in the backward pass."""
    cost = fast_layer(shape, step).kept()
    last = supervised_rows(step) * (shape.hidden * stream_bytes(step) + 4)
    return step.tokens * kept_by(cost, modes) + last, step.tokens * most_held(cost, modes) + last


def backward_bytes(shape: ModelShape, step: Step) -> int:
    return step.tokens * fast_layer(shape, step).backward(in_fp8=step.fp8_products)


def loss_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes at the loss: the normalized rows and their gradient, a part of the logits, which their gradient
    overwrites, on a CPU fp32 copies of some of them, and the head in the compute dtype."""
    rows = supervised_rows(step)
    part = min(rows, rows_at_a_time(shape.vocab, on_gpu=step.on_gpu))
    logits = part * shape.vocab * step.width
    if not step.on_gpu:
        logits += 2 * 4 * min(part * shape.vocab, max(shape.vocab, LOGITS_IN_CACHE))
    head = shape.vocab * shape.hidden * step.width if stream_bytes(step) > step.width else 0
    return 2 * rows * shape.hidden * stream_bytes(step) + logits + 2 * part * shape.hidden * step.width + head


def supervised_rows(step: Step) -> int:
    return step.batch * min(step.context, step.supervised or step.context)


def adapter_copy_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the adapters in the compute dtype: A and B of each group, and B padded with zeros beside the
    weights."""
    total = 0
    for group in groups(shape, step).values():
        total += group.columns * group.inputs + step.rank * group.adapted_outputs
        total += group.columns * group.outputs if group.columns <= MOST_COLUMNS else 0
    return shape.num_layers * total * step.width


def weight_buffer_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the buffers for dequantized weights: the largest group, and with fp8 products its e4m3 copy and
    the transpose. Weights stored in fp8 need none."""
    if step.quantizer == "none" or (step.quantizer == _STORED_IN_FP8 and step.fp8_products):
        return 0
    found = groups(shape, step).values()
    if step.fp8_products:
        return max(group.outputs * group.inputs for group in found) * (step.width + 2)
    extended = [group.columns if group.columns <= MOST_COLUMNS else 0 for group in found]
    wide = (group.outputs * (group.inputs + columns) for group, columns in zip(found, extended, strict=True))
    return max(wide) * step.width
