"""Run the decoder of a transformers model through fast layers that share its parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from crosstune.estimate.fast_layers import ACTIVATIONS, TILE_TOKENS, Recompute
from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.attention import Documents, Forks, attends_by_document, prefer_cudnn
from crosstune.torch_engine.kernels.frozen_weights import QuantizedWeights, Scratch
from crosstune.torch_engine.kernels.halves import (
    AttentionHalf,
    MLPHalf,
    Pass,
    Stream,
    add_and_normalize,
    run_attention,
    run_mlp,
)
from crosstune.torch_engine.kernels.head_loss import (
    Measure,
    head_errors,
    head_loss,
    head_token_losses,
    measure_head,
)
from crosstune.torch_engine.kernels.long_rows import KeptAttention, run_tiled_mlp
from crosstune.torch_engine.kernels.operations import Heads, Norm, Operations, has_triton
from crosstune.torch_engine.kernels.stacked import Publishing, Stacked

Layer = tuple[AttentionHalf, MLPHalf]
Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Rotary cosines and sines by kind of table."""
_WINDOW_IN_CONFIG = ("mistral", "phi3")
"""Families whose layers read their window from the config; in others a layer has it, or there is none."""


class FastDecoder:
    """The fast layers of a model, built over its modules. It shares their parameters and adds none."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        recompute: Sequence[Recompute] | Recompute = "lean",
        operations: Operations | None = None,
        fp8: bool = False,
        outside_fp8: Collection[str] = (),
        copies: bool = False,
    ) -> None:
        """Build the layers. With `fp8`, matmuls with a quantized base are computed in fp8, except in the groups
        `outside_fp8`. With `copies`, the dense weights are copied and the model's stay as they are."""
        self.model, self.inner, self.dtype = model, model.model, dtype
        self.device = self.inner.embed_tokens.weight.device
        self.operations = operations if operations is not None else choose_operations(self.device)
        self.scratch = Scratch(dtype=dtype, device=self.device)
        self.fp8_scratch = Scratch(dtype=torch.float8_e4m3fn, device=self.device) if fp8 else None
        self.outside_fp8, self.copies = outside_fp8, copies
        self.layers = [self._build(layer, index) for index, layer in enumerate(self.inner.layers)]
        self._publishing = Publishing(list(self.groups().values()))
        self.set_recomputation(recompute)
        self.norm = _read_norm(self.inner.norm)
        self.tile_tokens = TILE_TOKENS
        """Tokens of a tile of the MLP of recomputed layers; rows of twice as many are computed in tiles."""
        self.keeps_from: int | None = None
        """In rows of this length, recomputed layers keep the output of their attention; None: in no rows."""
        self.drops_padding = all(
            attends_by_document(self.device, dtype, half.window) for half, _ in self.layers
        )
        """True if rows of different lengths are computed as one row of documents, without padding."""

    def set_recomputation(self, recompute: Sequence[Recompute] | Recompute) -> None:
        """Set the recomputation mode of each layer, or one mode for all."""
        count = len(self.layers)
        self.recompute = [recompute] * count if isinstance(recompute, str) else list(recompute)
        assert len(self.recompute) == count

    def hidden(
        self,
        input_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        bounds: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        forks: Forks | None = None,
    ) -> torch.Tensor:
        """Return the normalized hidden states of all tokens, or of the tokens `rows` (indices over all rows). Tokens attend
        within the documents of `positions` and `bounds`, or of `forks`."""
        self.publish()
        count, length = input_ids.shape
        documents = Documents(count, length, positions, bounds, forks)
        with torch.autocast(self.device.type, enabled=False):
            stream: Stream = (self.inner.embed_tokens(input_ids).flatten(0, 1), None)
            given = Pass(
                operations=self.operations,
                documents=documents,
                tables=self.tables(positions, length),
                room=max(group.below for half in self.layers for group in (half[0].out, half[1].down)),
            )
            for layer, recompute in zip(self.layers, self.recompute, strict=True):
                stream = self._run(layer, stream, given, recompute)
            return add_and_normalize(stream, self.norm, given, rows)

    def hidden_with_cache(
        self,
        input_ids: torch.Tensor,
        *,
        tables: Tables,
        attend: Callable[[int, AttentionHalf, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states as `hidden` does, with the adapters as last published and without a backward pass. `attend` gets
        the number of the layer, its half, and queries, keys and values."""
        count, length = input_ids.shape
        documents = Documents(count, length)
        with torch.autocast(self.device.type, enabled=False):
            stream: Stream = (self.inner.embed_tokens(input_ids).flatten(0, 1), None)
            given = Pass(operations=self.operations, documents=documents, tables=tables)
            for index, (attention, mlp) in enumerate(self.layers):
                cached = partial(attend, index, attention)
                stream = run_attention(stream, attention, given, keep=True, cached=cached)
                stream = run_mlp(stream, mlp, given, keep=True)
            return add_and_normalize(stream, self.norm, given, rows)

    def publish(self) -> None:
        """Copy the current adapters into the compute dtype."""
        self._publishing.publish()

    @contextlib.contextmanager
    def dequantized(self) -> Iterator[None]:
        """Hold all weights dense in here, with the adapters as last published: a loop that reads them many times is faster."""
        groups = [group for group in self.groups().values() if isinstance(group.weights, QuantizedWeights)]
        try:
            for group in groups:
                group.weights.keep(group.b_columns)
            yield
        finally:
            for group in groups:
                group.weights.drop()

    def dequantized_bytes(self) -> int:
        """Return the bytes of the weights that `dequantized` holds."""
        weights = (group.weights for group in self.groups().values())
        return (
            sum(each.num_kept for each in weights if isinstance(each, QuantizedWeights)) * self.dtype.itemsize
        )

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy of normalized hidden states."""
        with torch.autocast(self.device.type, enabled=False):
            return head_loss(hidden, self.head(), targets, self.operations)

    def token_losses(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross entropy and the entropy of each token."""
        with torch.autocast(self.device.type, enabled=False):
            return head_token_losses(hidden, self.head(), targets, self.operations)

    def measure(
        self, hidden: torch.Tensor, loss_of: Measure, values_of: Measure
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each row of logits, and values without a gradient."""
        with torch.autocast(self.device.type, enabled=False):
            return measure_head(hidden, self.head(), loss_of, values_of)

    def loss_and_errors(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss for an evaluation, and which targets do not have the largest logit."""
        with torch.autocast(self.device.type, enabled=False):
            return head_errors(hidden, self.head(), targets, self.operations)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return hidden.to(self.dtype) @ self.head().t()

    def head(self) -> torch.Tensor:
        """Return the output matrix in the compute dtype."""
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return weight.detach().to(self.dtype)

    def groups(self) -> dict[str, Stacked]:
        """Return the stacked layers by name."""
        return {
            f"layers.{index}.{name}": stacked
            for index, (attention, mlp) in enumerate(self.layers)
            for name, stacked in (
                ("qkv", attention.qkv),
                ("out", attention.out),
                ("gate_up", mlp.gate_up),
                ("down", mlp.down),
            )
        }

    def exclude_from_fp8(self, names: Collection[str]) -> None:
        """Rebuild these groups from the model's current layers, with dense matmuls."""
        self.outside_fp8 = {*self.outside_fp8, *names}
        for index, layer in enumerate(self.inner.layers):
            if any(name.startswith(f"layers.{index}.") for name in names):
                self.layers[index] = self._build(layer, index)
        self._publishing = Publishing(list(self.groups().values()))

    def _run(self, layer: Layer, stream: Stream, given: Pass, recompute: Recompute) -> Stream:
        if recompute == "full" and torch.is_grad_enabled():
            total, added = stream
            if added is not None:  # one tensor is kept instead of two
                total = (total + added).to(total.dtype)
            tile = self.tile_tokens if len(total) >= 2 * self.tile_tokens else 0
            is_long = self.keeps_from is not None and given.documents.length >= self.keeps_from
            kept = KeptAttention() if is_long else None
            found: Stream = checkpoint(
                lambda total: _run_layer((total, None), layer, given, False, tile),
                total,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=partial(_contexts, given, kept),
            )
            if kept is not None:
                kept.hold()
            return found
        return _run_layer(stream, layer, given, recompute == "none")

    def tables(self, positions: torch.Tensor | None, length: int) -> Tables:
        """Return the model's rotary cosines and sines in fp32, with a column for each rotated pair."""
        if positions is None:
            positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        tables = {}
        for kind in {attention.rope for attention, _ in self.layers}:
            options = {"layer_type": kind} if kind else {}
            cos, sin = self.inner.rotary_emb(like, positions, **options)
            half = cos.shape[-1] // 2
            cos, sin = (table[..., :half].reshape(-1, half).contiguous() for table in (cos, sin))
            tables[kind] = (cos, sin)
        return tables

    def _build(self, layer: Any, index: int) -> Layer:
        config, attention, mlp = self.inner.config, layer.self_attn, layer.mlp
        post_attention: Norm | None = None
        mlp_norm = _read_norm(layer.post_attention_layernorm)  # in most families it precedes the MLP
        post_mlp = getattr(layer, "post_feedforward_layernorm", None)
        if post_mlp is not None:
            post_attention, mlp_norm = mlp_norm, _read_norm(layer.pre_feedforward_layernorm)
        has_qk_norms = hasattr(attention, "q_norm")
        kinds = getattr(config, "layer_types", None) if config.model_type == "gemma3_text" else None
        frequencies = f"{kinds[index]}_inv_freq" if kinds is not None else "inv_freq"
        has_qkv, has_gate_up = hasattr(attention, "qkv_proj"), hasattr(mlp, "gate_up_proj")  # Phi-3
        qkv = [attention.qkv_proj] if has_qkv else [attention.q_proj, attention.k_proj, attention.v_proj]
        gate_up = [mlp.gate_up_proj] if has_gate_up else [mlp.gate_proj, mlp.up_proj]
        # As in the fp8 quantizer: errors of the first and last down projection reach the head almost undiminished.
        down_in_fp8 = 0 < index < len(self.inner.layers) - 1
        first = AttentionHalf(
            norm=_read_norm(layer.input_layernorm),
            qkv=self._stack(f"layers.{index}.qkv", qkv),
            out=self._stack(f"layers.{index}.out", [attention.o_proj], own_input=False),
            heads=Heads(
                num_queries=config.num_attention_heads,
                num_keys=config.num_key_value_heads,
                size=attention.head_dim,
                rotary=2 * int(getattr(self.inner.rotary_emb, frequencies).shape[-1]),
            ),
            scale=attention.scaling,
            window=_layer_window(config, attention, index),
            rope=kinds[index] if kinds is not None else "",
            qk_norms=(_read_norm(attention.q_norm), _read_norm(attention.k_norm)) if has_qk_norms else None,
            post_norm=post_attention,
        )
        second = MLPHalf(
            norm=mlp_norm,
            gate_up=self._stack(f"layers.{index}.gate_up", gate_up),
            down=self._stack(f"layers.{index}.down", [mlp.down_proj], fp8=down_in_fp8),
            activation=ACTIVATIONS[getattr(config, "hidden_activation", None) or config.hidden_act],
            post_norm=_read_norm(post_mlp) if post_mlp is not None else None,
        )
        return first, second

    def _stack(
        self, name: str, layers: Sequence[Any], *, own_input: bool = True, fp8: bool = True
    ) -> Stacked:
        """Stack layers with the same input. `own_input`: one of our kernels makes it; `fp8`: they may use fp8 matmul."""
        in_fp8 = fp8 and name not in self.outside_fp8
        return Stacked(
            layers,
            dtype=self.dtype,
            scratch=self.scratch,
            may_extend=own_input,
            fp8=self.fp8_scratch if in_fp8 else None,
            copies=self.copies,
        )


def _run_layer(stream: Stream, layer: Layer, given: Pass, keep: bool, tile: int = 0) -> Stream:
    attention, mlp = layer
    with prefer_cudnn(stream[0].device):  # inside, so that a recomputed layer uses the same kernel
        stream = run_attention(stream, attention, given, keep=keep)
    if tile:
        return run_tiled_mlp(stream, mlp, given, tile=tile)
    return run_mlp(stream, mlp, given, keep=keep)


def _contexts(given: Pass, kept: KeptAttention | None) -> tuple[Any, Any]:
    """Return the contexts of a recomputed layer: of its forward pass, and of the recomputation."""
    if kept is None:
        return contextlib.nullcontext(), given.recomputing
    return kept.watching(), kept.replaying(given.recomputing)


def choose_operations(device: torch.device) -> Operations:
    """Return the Triton kernels on a GPU that supports them, plain torch otherwise."""
    if device.type == "cuda" and has_triton():
        from crosstune.torch_engine.kernels import triton_operations

        return triton_operations
    return torch_operations


def _read_norm(norm: Any) -> Norm:
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return Norm(norm.weight.detach(), eps, offset=1.0 if type(norm).__name__.startswith("Gemma") else 0.0)


def _layer_window(config: Any, attention: Any, index: int) -> int | None:
    """Return the number of tokens that a layer's attention sees; None for all."""
    kinds = getattr(config, "layer_types", None)
    in_config = config.model_type in _WINDOW_IN_CONFIG and (not kinds or kinds[index] == "sliding_attention")
    window: int | None = getattr(config, "sliding_window", None) if in_config else None
    return getattr(attention, "sliding_window", window)
