"""Define the multimodal diffusion transformer: separate weights for text and latent tokens, joint attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_blocks import FusedBlocks
from crosstune.recipes.latent_diffusion.torch_parts_packed import Packed

_TIME_COLUMNS = 256
_TIME_SCALE = 1000.0
_INITIAL_STD = 0.02
_ALIGNED = 64
"""The number of logits is padded to a multiple of this on GPUs, where unaligned rows are slow."""


class Layout(NamedTuple):
    """Map the flat list of real tokens to padded rows and back, so that only attention computes padding.

    No gradient adds several values to one place in arbitrary order, so results are deterministic.
    """

    row: torch.Tensor
    """(tokens,): the row of each token."""
    place: torch.Tensor
    """(tokens,): the flat index of each token in the padded rows."""
    padded: torch.Tensor
    """(rows, width): the padded tokens; only the shape is used."""


def to_rows(tokens: torch.Tensor, place: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    """Return (tokens, columns) as (rows, width, columns), with zeros for padding."""
    rows = tokens.new_zeros(padded.numel(), tokens.shape[-1]).index_copy(0, place, tokens)
    return rows.view(*padded.shape, -1)


def to_tokens(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return (rows, width, columns) as (tokens, columns)."""
    return rows.flatten(0, 1).index_select(0, layout.place)


class ForTokens(torch.autograd.Function):
    """Return (rows, columns) as (tokens, columns): repeat each row for its tokens."""

    @staticmethod
    def forward(ctx: Any, per_row: torch.Tensor, *layout: torch.Tensor) -> torch.Tensor:
        row, place, padded = layout
        ctx.save_for_backward(place, padded)
        return per_row.index_select(0, row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return to_rows(grads[0], *ctx.saved_tensors).sum(1), None, None, None


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def reset_parameters(self) -> None:
        """Do nothing: `initialize` draws all weights, and drawing a billion numbers twice costs seconds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class TimeEmbedding(nn.Module):
    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.inner, self.outer = Linear(_TIME_COLUMNS, cond_dim), Linear(cond_dim, cond_dim)

    def forward(self, time: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        half = _TIME_COLUMNS // 2
        steps = torch.arange(half, device=time.device, dtype=torch.float32)
        angles = time.float()[:, None] * _TIME_SCALE * torch.exp(-math.log(10_000.0) / half * steps)
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
        return self.outer(functional.silu(self.inner(waves)))


class Stream(nn.Module):
    """The weights of one modality in a block."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        hidden, self.heads = settings.hidden_size, settings.n_heads
        self.modulation = Linear(settings.cond_dim, 6 * hidden)
        self.qkv, self.out = Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.q_norm = nn.Parameter(torch.ones(hidden // self.heads))
        self.k_norm = nn.Parameter(torch.ones(hidden // self.heads))
        self.up, self.down = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)
        self.dropout = settings.dropout

    def modulations(self, cond: torch.Tensor, layout: Layout | None) -> tuple[torch.Tensor, ...]:
        """Return the six shifts, scales and gates of a block for the time embedding."""
        return per_token(self.modulation(cond), layout).chunk(6, dim=-1)

    def project(
        self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, *, layout: Layout | None = None
    ) -> torch.Tensor:
        """Return queries, keys and values of the normalized input, as (3, batch, heads, tokens, columns)."""
        columns = x.shape[-1] // self.heads
        mixed = self.qkv(modulate(x, shift, scale)).unflatten(-1, (3, self.heads, columns))
        q, k, v = mixed.unbind(-3)
        q = functional.rms_norm(q, (columns,), self.q_norm.to(q.dtype))
        k = functional.rms_norm(k, (columns,), self.k_norm.to(k.dtype))
        mixed = torch.stack([q, k, v], dim=-3)
        if layout is not None:
            mixed = to_rows(mixed.flatten(1), layout.place, layout.padded).unflatten(
                -1, (3, self.heads, columns)
            )
        return mixed.permute(2, 0, 3, 1, 4)

    def finish(
        self,
        x: torch.Tensor,
        attended: torch.Tensor,
        parts: tuple[torch.Tensor, ...],
        layout: Layout | None,
    ) -> torch.Tensor:
        """Add the output of attention and of the feed-forward layer to the residual stream."""
        gate, shift, scale, last_gate = parts
        attended = attended.transpose(1, 2).flatten(2)
        if layout is not None:
            attended = to_tokens(attended, layout)
        x = x + gate * self._drop(self.out(attended))
        inner = functional.gelu(self.up(modulate(x, shift, scale)), approximate="tanh")
        return x + last_gate * self._drop(self.down(inner))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, self.dropout, self.training) if self.dropout else x


class Block(nn.Module):
    """Attention over both modalities. In the last block, a modality without a prediction only gives keys and values.

    With a layout, the text is the flat list of the real tokens of all rows.
    """

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.text, self.latent = Stream(settings), Stream(settings)
        self.fuses_attention = True

    def forward(
        self,
        text: torch.Tensor,
        latent: torch.Tensor,
        cond: torch.Tensor,
        mask: torch.Tensor,
        keep_text: bool = True,
        keep_latent: bool = True,
        layout: Layout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of_text = self.text.modulations(cond, layout)
        of_latent = self.latent.modulations(cond, None)
        one = self.text.project(text, *of_text[:2], layout=layout)
        other = self.latent.project(latent, *of_latent[:2])
        q, k, v = torch.cat([one, other], dim=3).unbind(0)
        if self.fuses_attention:
            attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            attended = attend_plainly(q, k, v, mask)
        split = one.shape[3]
        if keep_text:
            text = self.text.finish(text, attended[:, :, :split], of_text[2:], layout)
        if keep_latent:
            latent = self.latent.finish(latent, attended[:, :, split:], of_latent[2:], None)
        return text, latent


@dataclass(frozen=True)
class Output:
    """Predictions; None if not requested."""

    logits: torch.Tensor | None
    """Logits of the tokens at `places`, or of all."""
    latent: torch.Tensor | None
    length: torch.Tensor | None
    """Logits of the number of tokens, from 1."""


class LatentDiffusionModel(nn.Module):
    def __init__(self, settings: ModelSettings, *, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        hidden, cond, many = settings.hidden_size, settings.cond_dim, settings.latent_tokens
        self.settings, self.compute_dtype = settings, compute_dtype
        self.keeps_text = self.keeps_latent = True
        self.aligns_logits = False
        """Pad the vocabulary of the logits with -inf to a multiple of 64."""
        self._recomputes: dict[str, Any] | None = None
        self.fused: FusedBlocks | None = None
        """Compute batches without padding with these blocks."""
        self.token_embedding = nn.Embedding(settings.vocabulary, hidden)
        self.position_embedding = nn.Embedding(settings.max_tokens, hidden)
        self.latent_in = Linear(settings.latent_dim, many * hidden)
        self.latent_position = nn.Parameter(torch.empty(many, hidden))
        self.null_latent = nn.Parameter(torch.empty(many, hidden))
        self.text_time, self.latent_time = TimeEmbedding(cond), TimeEmbedding(cond)
        self.times_in, self.times_out = Linear(2 * cond, cond), Linear(cond, cond)
        self.blocks = nn.ModuleList([Block(settings) for _ in range(settings.n_blocks)])
        self.text_modulation, self.latent_modulation = Linear(cond, 2 * hidden), Linear(cond, 2 * hidden)
        self.text_bias = nn.Parameter(torch.empty(settings.vocabulary))
        self.latent_head = Linear(many * hidden, settings.latent_dim)
        self.length_in, self.length_out = Linear(many * hidden, hidden), Linear(hidden, settings.max_tokens)
        self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Draw the weights. Blocks start as the identity: their gates are zero."""
        zero = {self.text_modulation, self.latent_modulation}
        for block in self.blocks:
            zero |= {block.text.modulation, block.latent.modulation}
        for module in self.modules():
            if module in zero:
                module.weight.zero_()
            elif isinstance(module, (nn.Linear, nn.Embedding)):
                std = _INITIAL_STD if isinstance(module, nn.Embedding) else module.in_features**-0.5
                module.weight.normal_(0.0, std)
            if isinstance(module, nn.Linear):
                module.bias.zero_()
        for parameter in (self.latent_position, self.null_latent):
            parameter.normal_(0.0, _INITIAL_STD)
        self.text_bias.zero_()

    def forward(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        text_time: torch.Tensor,
        latent_time: torch.Tensor,
        without_latent: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        real: tuple[torch.Tensor, torch.Tensor] | None = None,
        packed: Packed | None = None,
    ) -> Output:
        """Predict the clean tokens and the clean vector from noisy inputs.

        Logits are computed for the tokens at the flat indices `places`. With `real`, the row and the flat index of each
        real token, the layers skip padding, and `places` are indices into the real tokens. With `packed`, the fused blocks
        run, and `places` are indices into the packed rows.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            dtype, width = self.compute_dtype, tokens.shape[1]
            layout = Layout(*real, tokens) if real is not None else None
            positions = torch.arange(width, device=tokens.device)
            if packed is not None:
                tokens = tokens.flatten().index_select(0, packed.text_sources)
                positions = packed.text_sources % width
            text = (self.token_embedding(tokens) + self.position_embedding(positions)).to(dtype)
            if layout is not None:
                text = to_tokens(text, layout)
            latent = self._embed_latent(latents, without_latent)
            times = [self.text_time(text_time, dtype), self.latent_time(latent_time, dtype)]
            cond = self.times_out(functional.silu(self.times_in(functional.silu(torch.cat(times, dim=-1)))))
            cond = functional.silu(cond)
            length = None
            if self.keeps_text:
                length = self.length_out(functional.gelu(self.length_in(latent.flatten(1)))).float()
            if packed is not None:
                return self._run_fused(text, latent, cond, length, places, packed)
            keys = torch.arange(width + self.settings.latent_tokens, device=lengths.device)
            mask = ((keys < lengths[:, None]) | (keys >= width))[:, None, None]
            last = len(self.blocks) - 1
            for number, block in enumerate(self.blocks):
                keeps = (number < last or self.keeps_text, number < last or self.keeps_latent)
                if self._recomputes is not None and self.training:
                    text, latent = checkpoint(
                        block, text, latent, cond, mask, *keeps, layout, **self._recomputes
                    )
                else:
                    text, latent = block(text, latent, cond, mask, *keeps, layout)
            logits = None
            if self.keeps_text:
                shift, scale = per_token(self.text_modulation(cond), layout).chunk(2, dim=-1)
                logits = self._text_logits(modulate(text, shift, scale), places)
            vector = None
            if self.keeps_latent:
                shift, scale = self.latent_modulation(cond)[:, None].chunk(2, dim=-1)
                vector = self.latent_head(modulate(latent, shift, scale).flatten(1)).float()
            return Output(logits, vector, length)

    def _embed_latent(self, latents: torch.Tensor, without: torch.Tensor | None) -> torch.Tensor:
        rows, many = len(latents), self.settings.latent_tokens
        embedded = self.latent_in(latents.to(self.compute_dtype)).view(rows, many, -1)
        null = self.null_latent.to(embedded.dtype)
        if without is not None:
            embedded = torch.where(without[:, None, None], null, embedded)
        return embedded + self.latent_position.to(embedded.dtype)

    def _run_fused(
        self,
        text: torch.Tensor,
        latent: torch.Tensor,
        cond: torch.Tensor,
        length: torch.Tensor | None,
        places: torch.Tensor | None,
        packed: Packed,
    ) -> Output:
        assert self.fused is not None
        zeros = text.new_zeros(len(packed.is_latent), text.shape[1])
        text, latent = self.fused.run(
            zeros.index_copy(0, packed.text_places, text),
            latent.flatten(0, 1),
            cond,
            packed,
            keeps_text=self.keeps_text,
            keeps_latent=self.keeps_latent,
            recomputes=self._recomputes is not None and self.training,
        )
        logits = self._text_logits(text, places) if self.keeps_text else None
        vector = self.latent_head(latent.view(packed.num_rows, -1)).float() if self.keeps_latent else None
        return Output(logits, vector, length)

    def _text_logits(self, states: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of modulated states."""
        if places is not None:
            states = states.flatten(0, -2).index_select(0, places)
        weight, bias = self.token_embedding.weight.to(states.dtype), self.text_bias.to(states.dtype)
        if places is not None and self.aligns_logits:
            added = -len(bias) % _ALIGNED
            weight = functional.pad(weight, (0, 0, 0, added))
            bias = functional.pad(bias, (0, added), value=-torch.inf)
        return functional.linear(states, weight, bias)

    def predict(self, *, text: bool, latent: bool) -> None:
        """Choose the outputs, and freeze the weights that only the other outputs use."""
        self.keeps_text, self.keeps_latent = text, latent
        last = self.blocks[-1]
        for kept, stream, heads in (
            (text, last.text, [self.text_modulation, self.length_in, self.length_out]),
            (latent, last.latent, [self.latent_modulation, self.latent_head]),
        ):
            for module in (*heads, stream.out, stream.up, stream.down):
                module.requires_grad_(kept)
        self.text_bias.requires_grad_(text)

    def gradient_checkpointing_enable(self, *, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        """Recompute each block in the backward pass instead of keeping its activations."""
        self._recomputes = gradient_checkpointing_kwargs

    def enable_input_require_grads(self) -> None:
        """Do nothing: the embeddings are trained, so the first block's input requires gradients already."""


def attend_plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute attention without a fused kernel, keeping the scores for the backward pass."""
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def per_token(per_row: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    """Return per-row values in a shape that broadcasts over the tokens of each row."""
    if layout is None:
        return per_row[:, None]
    return ForTokens.apply(per_row, *layout)


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Apply a layer norm without weights, then shift and scale."""
    return functional.layer_norm(x, (x.shape[-1],)) * (1 + scale) + shift
