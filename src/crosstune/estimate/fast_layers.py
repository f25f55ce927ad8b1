"""Describe the fast layers for the torch engine and the memory estimate: models, chunk sizes, memory, recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from crosstune.estimate.model_shape import ModelShape, Step, adapted_linears

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
QK_NORM_FAMILIES = ("qwen3", "gemma3_text")
POST_NORM_FAMILIES = ("gemma2", "gemma3_text")
"""Families with a norm after each half of a layer."""
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_DROPOUTS = ("attention_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout")
_DEFAULTS = {"gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}}
"""Defaults of transformers for fields missing in config.json."""
MAX_COLUMNS = 256
"""With more adapter columns than this, multiplying the zeros of the group's other layers costs more than it saves."""
_ALIGNED_ON_CPU, _ALIGNED_ON_GPU = 16, 64
"""Columns of x A are padded to multiples of this, for cache lines and matmul tiles."""
LOGITS_ON_CPU, LOGITS_ON_GPU = 2**24, 2**26
"""Logits computed at a time."""
MIN_ROWS, MAX_ROWS = 256, 4096
"""Bounds of the rows computed at a time."""
LOGITS_IN_CACHE = 2**20
"""Logits whose loss is computed at once on a CPU: few enough for its caches."""
SHORTEST_ROW, LONGEST_ROW = 128, 1024
"""Lengths of rows whose attention uses batched matmul on a CPU: 10 to 30 % faster there than torch's fused attention."""
LONGEST_KEPT_ROW = 256
"""Longest row whose attention probabilities are kept for the backward pass; longer rows recompute them."""
QUERIES_AT_A_TIME = 64
"""Queries multiplied at once with all keys before them."""

TILE_TOKENS = 8192
"""Tokens of a tile of the MLP of recomputed layers, if there are at least twice as many."""
LONG_ROW = 8192
"""Rows of this length keep the output of attention in recomputed layers, if activations are in host memory."""
HOST_SHARE = 0.7
"""The share of host memory for activations."""

_GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers with the same input, computed in one matmul."""

Recompute = Literal["none", "lean", "full"]
"""Recomputed in a layer's backward pass: the gated activation, fused into another kernel; also the norms; or the whole layer."""
USED_SHARE = 0.85
"""The fraction of free memory for kept activations; matmuls, gradients and fragmentation use the rest."""


def why_no_fast_layers(field: Callable[[str], Any]) -> str | None:
    """Return why the fast layers do not support a model, from the fields of its config; None if they do."""
    family = field("model_type")
    if family not in FAMILIES:
        return f"the fast layers support {', '.join(FAMILIES)}, not {family}"
    if field("attn_logit_softcapping") is not None:
        return "its attention caps its scores, which the fast kernels do not support"
    if field("final_logit_softcapping") is not None:
        return "it caps its logits"
    if field("use_bidirectional_attention"):
        return "its attention is not causal"
    for name in _DROPOUTS:
        if field(name):
            return f"its config sets {name}"
    activation = field("hidden_activation") or field("hidden_act")
    if activation is not None and str(activation) not in ACTIVATIONS:
        return f"the fast layers do not support its activation {activation}"
    return None


def why_no_fast_layers_of(config: Mapping[str, Any]) -> str | None:
    """Return why the fast layers do not support the model of a config.json; None if they do or its family is unknown."""
    family = config.get("model_type")
    return why_no_fast_layers((_DEFAULTS.get(family, {}) | dict(config)).get) if family else None


def adapter_columns(used: int, *, on_gpu: bool) -> int:
    """Return the padded number of columns of x A for a layer group."""
    aligned = _ALIGNED_ON_GPU if on_gpu else _ALIGNED_ON_CPU
    return -(-used // aligned) * aligned


def rows_at_a_time(vocabulary: int, *, on_gpu: bool) -> int:
    """Return the number of rows whose logits are computed at a time."""
    logits = LOGITS_ON_GPU if on_gpu else LOGITS_ON_CPU
    return min(max(logits // vocabulary, MIN_ROWS), MAX_ROWS)


def attends_by_products(length: int, *, on_gpu: bool) -> bool:
    """Return True if attention in rows of this length uses batched matmul."""
    return not on_gpu and SHORTEST_ROW <= length <= LONGEST_ROW


def attention_bytes(length: int, *, compute_bytes: int, on_gpu: bool) -> int:
    """Return the bytes kept per head and token: the fp32 log-sum-exp of a fused kernel, or the probabilities."""
    if not attends_by_products(length, on_gpu=on_gpu):
        return 4
    if length > LONGEST_KEPT_ROW:
        return 0
    starts = range(0, length, QUERIES_AT_A_TIME)
    stops = [min(start + QUERIES_AT_A_TIME, length) for start in starts]
    seen = sum((stop - start) * stop for start, stop in zip(starts, stops, strict=True))
    return -(-seen * compute_bytes // length)


@dataclass(frozen=True, kw_only=True)
class FastLayer:
    """The sizes of a layer that determine its memory."""

    hidden: int
    intermediate: int
    queries: int
    keys: int
    """The width of the keys, and of the values."""
    num_heads: int
    qkv_columns: int
    out_columns: int
    gate_up_columns: int
    down_columns: int
    """The columns of x A of each group."""
    compute_bytes: int
    stream_bytes: int
    """Bytes of a number of the residual stream; more than compute_bytes under autocast."""
    attention_bytes: int
    """Kept by attention for each head and token, without inputs and outputs."""
    qk_norms: bool = False
    post_norms: bool = False

    def kept(self) -> LayerBytes:
        """Return the bytes per token that the layer keeps for its backward pass."""
        rstd = 4  # the inverse root mean square of a norm's input, in fp32
        packed = self.queries + 2 * self.keys
        columns = self.qkv_columns + self.out_columns + self.gate_up_columns + self.down_columns
        values = packed + self.queries + 2 * self.intermediate + columns
        if self.qk_norms:
            values += self.queries + self.keys  # rotated apart from the rows before the norms
        norms = 2 * rstd
        if self.post_norms:
            values += 2 * self.hidden
            norms += 2 * rstd
        attention = self.num_heads * self.attention_bytes
        lean = 2 * self.hidden * self.stream_bytes + values * self.compute_bytes + norms + attention
        return LayerBytes(
            none=lean + 2 * self.hidden * self.compute_bytes,
            lean=lean,
            full=self.hidden * self.stream_bytes,
        )

    def recomputed(self) -> int:
        """Return the bytes per token that a recomputed layer holds whose MLP is computed in tiles: its attention's tensors and
        the stream after it."""
        values = 2 * self.queries + 2 * self.keys + self.qkv_columns + self.out_columns
        if self.qk_norms:
            values += self.queries + self.keys
        if self.post_norms:
            values += self.hidden
        attention = self.num_heads * self.attention_bytes
        return self.hidden * self.stream_bytes + values * self.compute_bytes + attention

    def backward(self, *, in_fp8: bool, tile_share: float = 1.0) -> int:
        """Return the peak bytes of temporary tensors in the backward pass, for each token: in the MLP or in attention. fp8
        matmuls also read an e4m3 copy of each gradient. A tile of the MLP has `tile_share` of the tokens."""
        stream = self.hidden * (self.stream_bytes + self.compute_bytes)
        packed = self.queries + 2 * self.keys
        mlp = 4 * self.intermediate + 2 * self.down_columns + 2 * (self.hidden + self.gate_up_columns)
        mlp_in_fp8 = in_fp8 * (self.hidden + 2 * self.intermediate)
        if tile_share == 1:
            attention = self.queries + 2 * packed + 2 * (self.hidden + self.qkv_columns)
            return stream + max(
                mlp * self.compute_bytes + mlp_in_fp8, attention * self.compute_bytes + in_fp8 * packed
            )
        # With what a tile keeps for its own backward pass.
        mlp += 2 * self.intermediate + self.gate_up_columns + self.down_columns + 2 * self.hidden
        tile = int(tile_share * (mlp * self.compute_bytes + mlp_in_fp8)) + self.hidden * self.compute_bytes
        scores = (self.queries + packed) * self.compute_bytes
        # Then queries, keys, values and the output of attention are free, and the gradient is packed.
        values = packed - self.queries + 2 * (self.hidden + self.qkv_columns)
        return stream + max(tile, scores, values * self.compute_bytes + in_fp8 * packed)


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The bytes per token that a layer keeps for the backward pass."""

    none: int
    lean: int
    full: int


def plan_recomputation(
    cost: LayerBytes, *, num_layers: int, num_tokens: int, free_bytes: int, working_bytes: int = 0
) -> list[Recompute]:
    """Return the cheapest modes that fit: all none, all lean, or as many lean layers as fit after full ones.
    `working_bytes` of the free memory are reserved for other tensors."""
    room = min(int(free_bytes * USED_SHARE), free_bytes - working_bytes)
    if num_layers * num_tokens * cost.none <= room:
        return ["none"] * num_layers
    for num_full in range(num_layers):
        modes: list[Recompute] = ["full"] * num_full
        modes += ["lean"] * (num_layers - num_full)
        if (kept_by(cost, modes) + (cost.lean if num_full else 0)) * num_tokens <= room:
            return modes
    return ["full"] * num_layers


def kept_by(cost: LayerBytes, modes: Sequence[Recompute]) -> int:
    """Return the bytes per token that layers of these modes keep."""
    return sum(getattr(cost, mode) for mode in modes)


def most_held(cost: LayerBytes, modes: Sequence[Recompute]) -> int:
    """Return the peak in the backward pass: everything kept, or the inputs of the full layers plus one recomputed layer."""
    num_full = modes.count("full")
    return max(kept_by(cost, modes), num_full * cost.full + cost.lean if num_full else 0)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The sizes of a layer group and its adapters."""

    outputs: int
    inputs: int
    adapted_outputs: int
    columns: int


def groups(shape: ModelShape, step: Step) -> dict[str, Group]:
    """Return the groups of linear layers of a block by name."""
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
    """Return the sizes of a layer from the shape of the model."""
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
    """Return the bytes of a number of the residual stream; under autocast it keeps the embedding's dtype."""
    return max(step.width, step.weight_bits // 8)


def recomputation(shape: ModelShape, step: Step, *, held_bytes: int, working_bytes: int) -> list[Recompute]:
    """Return the recomputation that the engine chooses for each layer, with `held_bytes` of weights in memory."""
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
    layer = fast_layer(shape, step)
    cost = layer.kept()
    last = supervised_rows(step) * (shape.hidden * stream_bytes(step) + 4)
    kept = kept_by(cost, modes)
    held = most_held(cost, modes)
    if tile_share(step) < 1 and "full" in modes:
        held = max(kept, modes.count("full") * cost.full + layer.recomputed())
    if step.offloads_activations:  # but for two layers on their way, and one that is recomputed
        held, kept = held - kept + 2 * max(cost.full, kept // shape.num_layers), 0
    return step.tokens * kept + last, step.tokens * held + last


def tile_share(step: Step) -> float:
    """Return the share of the tokens of a step that the MLP of a recomputed layer computes at a time."""
    return TILE_TOKENS / step.tokens if step.checkpointing and step.tokens >= 2 * TILE_TOKENS else 1.0


def backward_bytes(shape: ModelShape, step: Step) -> int:
    layer = fast_layer(shape, step)
    return int(step.tokens * layer.backward(in_fp8=step.fp8_products, tile_share=tile_share(step)))


def loss_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes at the loss: normalized rows and their gradient, a chunk of logits, and the head's copy."""
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
    """Return the bytes of the adapters in the compute dtype: A and B of each group, and B padded with zeros."""
    total = 0
    for group in groups(shape, step).values():
        total += group.columns * group.inputs + step.rank * group.adapted_outputs
        total += group.columns * group.outputs if group.columns <= MAX_COLUMNS else 0
    return shape.num_layers * total * step.width


def weight_buffer_bytes(shape: ModelShape, step: Step) -> int:
    """Return the bytes of the buffers for dequantized weights: the largest group, for fp8 matmuls with e4m3 copies."""
    if step.quantizer == "none" or (step.quantizer == "fp8" and step.fp8_products):
        return 0
    found = groups(shape, step).values()
    if step.fp8_products:
        return max(group.outputs * group.inputs for group in found) * (step.width + 2)
    extended = [group.columns if group.columns <= MAX_COLUMNS else 0 for group in found]
    wide = (group.outputs * (group.inputs + columns) for group, columns in zip(found, extended, strict=True))
    return max(wide) * step.width
