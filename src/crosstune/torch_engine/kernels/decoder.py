"""Run the decoder of a transformers model through fast layers that share its parameters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from crosstune.estimate.fast_layers import Recompute
from crosstune.torch_engine.kernels import find_parts
from crosstune.torch_engine.kernels.attention import Documents, attends_by_document, prefer_cudnn
from crosstune.torch_engine.kernels.dispatch import choose_operations
from crosstune.torch_engine.kernels.frozen_weights import Scratch
from crosstune.torch_engine.kernels.halves import (
    AttentionHalf,
    MLPHalf,
    Pass,
    Stream,
    add_and_normalize,
    run_attention,
    run_mlp,
)
from crosstune.torch_engine.kernels.head_loss import head_errors, head_loss
from crosstune.torch_engine.kernels.operations import Operations
from crosstune.torch_engine.kernels.stacked import Publishing, Stacked

Layer = tuple[AttentionHalf, MLPHalf]


class FastDecoder:
    """The layers of a model, built over its own modules: it has no parameters, and what the optimizer, checkpoints and
    exports do to the model they do to it."""

    def __init__(
        self,
        model: Any,
        *,
        dtype: torch.dtype,
        recompute: Sequence[Recompute] | Recompute = "lean",
        operations: Operations | None = None,
        fp8: bool = False,
        outside_fp8: Collection[str] = (),
    ) -> None:
        """Build the layers. With `fp8`, products with a quantized base are computed in fp8, but for the groups of these
        names."""
        self.model, self.inner, self.dtype = model, model.model, dtype
        self.device = self.inner.embed_tokens.weight.device
        self.operations = operations if operations is not None else choose_operations(self.device)
        self.scratch = Scratch(dtype=dtype, device=self.device)
        self.fp8_scratch = Scratch(dtype=torch.float8_e4m3fn, device=self.device) if fp8 else None
        self.outside_fp8 = outside_fp8
        self.layers = [self._build(layer, index) for index, layer in enumerate(self.inner.layers)]
        self._publishing = Publishing(list(self.groups().values()))
        self.set_recomputation(recompute)
        self.norm = find_parts.read_norm(self.inner.norm)
        windows = {attention.window for attention, _ in self.layers}
        self.drops_padding = all(attends_by_document(self.device, dtype, window) for window in windows)
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
    ) -> torch.Tensor:
        """Return the normalized hidden states of all tokens, or of those with these indices over all rows. Tokens attend
        within the documents of `positions` and `bounds`."""
        self.publish()
        count, length = input_ids.shape
        documents = Documents(count, length, positions, bounds)
        with torch.autocast(self.device.type, enabled=False):
            stream: Stream = (self.inner.embed_tokens(input_ids).flatten(0, 1), None)
            given = Pass(
                operations=self.operations,
                documents=documents,
                tables=self._tables(positions, length),
                room=max(group.below for half in self.layers for group in (half[0].out, half[1].down)),
            )
            for layer, recompute in zip(self.layers, self.recompute, strict=True):
                stream = self._run(layer, stream, given, recompute)
            return add_and_normalize(stream, self.norm, given, rows)

    def loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy of normalized hidden states."""
        with torch.autocast(self.device.type, enabled=False):
            return head_loss(hidden, self._head(), targets, self.operations)

    def loss_and_errors(
        self, hidden: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss for an evaluation, and which targets do not have the largest logit."""
        with torch.autocast(self.device.type, enabled=False):
            return head_errors(hidden, self._head(), targets, self.operations)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device.type, enabled=False):
            return hidden.to(self.dtype) @ self._head().t()

    def _head(self) -> torch.Tensor:
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

    def leave_fp8(self, names: Collection[str]) -> None:
        """Rebuild the groups of these names from the model's present layers, with dense products."""
        self.outside_fp8 = {*self.outside_fp8, *names}
        for index, layer in enumerate(self.inner.layers):
            if any(name.startswith(f"layers.{index}.") for name in names):
                self.layers[index] = self._build(layer, index)
        self._publishing = Publishing(list(self.groups().values()))

    def publish(self) -> None:
        """Copy the current adapters into the fast layers, before each pass."""
        self._publishing.publish()

    def _run(self, layer: Layer, stream: Stream, given: Pass, recompute: Recompute) -> Stream:
        if recompute == "full" and torch.is_grad_enabled():
            total, added = stream
            if added is not None:  # one tensor is kept instead of two
                total = (total + added).to(total.dtype)
            found: Stream = checkpoint(
                _run_whole,
                total,
                layer,
                given,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=given.recomputing.contexts,
            )
            return found
        return _run_layer(stream, layer, given, recompute == "none")

    def _tables(
        self, positions: torch.Tensor | None, length: int
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the model's own cosines and sines, in fp32, one column for each pair that is rotated."""
        if positions is None:
            positions = torch.arange(length, device=self.device)[None]
        like = torch.empty(0, dtype=torch.float32, device=self.device)
        tables = {}
        for kind in {attention.rope for attention, _ in self.layers}:
            options = {"layer_type": kind} if kind else {}
            cos, sin = self.inner.rotary_emb(like, positions, **options)
            half = cos.shape[-1] // 2
            tables[kind] = (
                cos[..., :half].reshape(-1, half).contiguous(),
                sin[..., :half].reshape(-1, half).contiguous(),
            )
        return tables

    def _build(self, layer: Any, index: int) -> Layer:
        config, attention = self.inner.config, layer.self_attn
        after, before, last = find_parts.mlp_norms(layer)
        kinds = getattr(config, "layer_types", None) if config.model_type == "gemma3_text" else None
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        first = AttentionHalf(
            norm=find_parts.read_norm(layer.input_layernorm),
            qkv=self._stack(f"layers.{index}.qkv", find_parts.qkv_layers(attention)),
            out=self._stack(f"layers.{index}.out", [attention.o_proj], own_input=False),
            heads=find_parts.read_heads(attention, config, rotary=self._rotary(kinds, index)),
            scale=attention.scaling,
            window=find_parts.layer_window(config, attention, index),
            rope=kinds[index] if kinds is not None else "",
            qk_norms=(find_parts.read_norm(norms[0]), find_parts.read_norm(norms[1])) if norms else None,
            post_norm=find_parts.read_norm(after) if after is not None else None,
        )
        second = MLPHalf(
            norm=find_parts.read_norm(before),
            gate_up=self._stack(f"layers.{index}.gate_up", find_parts.gate_up_layers(layer.mlp)),
            # As in the weights that the quantizer fp8 makes: errors of these two reach the head almost unweakened.
            down=self._stack(
                f"layers.{index}.down", [layer.mlp.down_proj], fp8=0 < index < len(self.inner.layers) - 1
            ),
            activation=find_parts.activation_kind(config),
            post_norm=find_parts.read_norm(last) if last is not None else None,
        )
        return first, second

    def _rotary(self, kinds: Sequence[str] | None, index: int) -> int:
        name = f"{kinds[index]}_inv_freq" if kinds is not None else "inv_freq"
        return 2 * int(getattr(self.inner.rotary_emb, name).shape[-1])

    def _stack(
        self, name: str, layers: Sequence[Any], *, own_input: bool = True, fp8: bool = True
    ) -> Stacked:
        """Stack layers with the same input; `own_input` if one of our kernels makes it, `fp8` if they may multiply in fp8."""
        in_fp8 = fp8 and name not in self.outside_fp8
        return Stacked(
            layers,
            dtype=self.dtype,
            scratch=self.scratch,
            may_extend=own_input,
            fp8=self.fp8_scratch if in_fp8 else None,
        )


def _run_whole(total: torch.Tensor, layer: Layer, given: Pass) -> Stream:
    """Run a layer that is computed again for its backward pass."""
    return _run_layer((total, None), layer, given, False)


def _run_layer(stream: Stream, layer: Layer, given: Pass, keep: bool) -> Stream:
    attention, mlp = layer
    with prefer_cudnn(stream[0].device):  # inside, so that a recomputed layer uses the same kernel
        stream = run_attention(stream, attention, given, keep=keep)
    return run_mlp(stream, mlp, given, keep=keep)
