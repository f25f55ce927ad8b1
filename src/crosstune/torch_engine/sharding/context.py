"""Divide the tokens of each row among ranks: every rank computes two pieces of a row and attends to the keys of all ranks.

Torch's own ring attention needs a kernel that returns its log-sum-exp, and has none for CPUs. Here all ranks gather the keys
and values of a layer before its attention, and sum their gradients after it: this gives the same results with any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import nn

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import IGNORED, TokenBatch, number_answers
from crosstune.torch_engine.device import evaluating
from crosstune.torch_engine.sharding.local_shard import free_gathered

ATTENTION = "crosstune_context"
"""The name under which transformers finds `attend`."""


@dataclass(frozen=True, kw_only=True)
class RowPart:
    """The part of every row on this rank.

    Later tokens attend to more keys. A row is cut into 2 N equal pieces, and rank i gets pieces i and 2 N - 1 - i, so that
    all ranks have the same amount of work.
    """

    number: int
    count: int
    group: Any
    """The ranks that share a row."""

    def columns(self, length: int) -> NDArray[np.int64]:
        """Return the columns of this rank, ascending; `length` is a multiple of twice the number of ranks."""
        size = length // (2 * self.count)
        starts = (self.number * size, (2 * self.count - 1 - self.number) * size)
        return np.concatenate([np.arange(start, start + size) for start in starts])

    def cut(self, batch: TokenBatch) -> tuple[TokenBatch, NDArray[np.int64]]:
        """Return the columns of this rank, and the number of the answer of each supervised token in them."""
        answers = np.full(batch.targets.shape, -1, np.int64)
        answers[batch.targets != IGNORED] = number_answers(batch)
        length = batch.targets.shape[1]
        missing = -length % (2 * self.count)
        columns = self.columns(length + missing)

        def own(values: NDArray[Any], *, fill: int = 0) -> NDArray[Any]:
            return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)[:, columns]

        shared = ("input_ids", "segments", "noise_keys", "noise_scales")
        arrays: dict[str, Any] = {
            name: own(getattr(batch, name)) for name in shared if getattr(batch, name) is not None
        }
        arrays |= {
            "targets": own(batch.targets, fill=IGNORED),
            "positions": np.broadcast_to(columns.astype(batch.positions.dtype), arrays["input_ids"].shape),
        }
        found = own(answers, fill=-1)
        return replace(batch, **arrays), found[found >= 0]

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks that share a row."""
        dist.all_reduce(values, group=self.group)
        return values


class _Gather(torch.autograd.Function):
    """Gather the pieces of all ranks in the order of the row; the gradient of a piece is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, part: RowPart) -> torch.Tensor:
        ctx.part = part
        found = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(part.count)]
        dist.all_gather(found, local.contiguous(), group=part.group)
        halves = [each.chunk(2, dim=2) for each in found]
        return torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim=2)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, None]:
        part: RowPart = ctx.part
        pieces = upstream[0].chunk(2 * part.count, dim=2)
        pairs = zip(pieces[: part.count], reversed(pieces[part.count :]), strict=True)
        parts = torch.cat([torch.cat(pair, dim=2) for pair in pairs])
        own = parts.new_empty((len(parts) // part.count, *parts.shape[1:]))
        # Newer versions of torch deprecate the older name.
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        reduce_scatter(own, parts, group=part.group)
        return own, None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context_part: RowPart | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of this rank's queries; for rows that are not divided, the attention of transformers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if context_part is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    part = context_part
    repeats = query.shape[1] // key.shape[1]
    key, value = (_Gather.apply(each, part).repeat_interleave(repeats, dim=1) for each in (key, value))
    size = query.shape[2] // 2
    found = []
    for piece, number in zip(
        query.split(size, 2), (part.number, 2 * part.count - 1 - part.number), strict=True
    ):
        seen = (number + 1) * size  # the last of them are the piece's own
        mask = _causal_mask(size, seen, query.device)
        found.append(
            F.scaled_dot_product_attention(piece, key[:, :, :seen], value[:, :, :seen], mask, scale=scaling)
        )
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def _causal_mask(size: int, seen: int, device: torch.device) -> torch.Tensor:
    """Return the mask of the last `size` of `seen` tokens: on a GPU, a bias type that fused kernels recognize; on a CPU, a
    tensor."""
    if device.type == "cpu":
        return torch.ones(size, seen, dtype=torch.bool).tril(seen - size)
    from torch.nn.attention.bias import causal_lower_right  # slow to import: it needs torch's compiler

    found: torch.Tensor = causal_lower_right(size, seen)
    return found


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def part_options(positions: torch.Tensor, part: RowPart) -> dict[str, Any]:
    """Return the model's arguments for its part of the rows. The mask is a placeholder: the model passes it on, and `attend`
    ignores it."""
    mask = torch.zeros(1, 1, 1, 1, device=positions.device)
    return {"position_ids": positions, "attention_mask": mask, "context_part": part}


def check_parts(model: Any, part: RowPart, *, device: torch.device) -> None:
    """Raise if the model cannot divide its rows: a trial compares its logits with the logits of a whole row. Collective:
    every rank must call it."""
    config, why = model.config, ""
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    ropes = getattr(config, "rope_parameters", None) or {}
    if getattr(config, "vision_config", None) is not None:
        why = "it reads pictures, which are not divided"
    elif kinds or (not hasattr(config, "layer_types") and getattr(config, "sliding_window", None)):
        why = f"its layers have {', '.join(sorted(kinds)) or 'a sliding window'}, and only plain causal attention is divided"
    elif ropes.get("rope_type") in ("dynamic", "longrope"):
        why = f"its rotary positions ({ropes['rope_type']}) depend on the length of the row, which no rank knows"
    elif not _agrees(model, part, device):
        why = "in a trial, its logits differ from a whole row's: a layer other than attention mixes tokens"
    if why:
        raise UserError(
            f"--context_parallel does not work with {type(model).__name__}.", why=f"{why}.", do="remove it"
        )


def _agrees(model: Any, part: RowPart, device: torch.device) -> bool:
    row = torch.arange(3, 3 + 8 * part.count, device=device)[None] % model.config.vocab_size
    columns = torch.from_numpy(part.columns(row.shape[1])).to(device)
    agrees = True
    with evaluating(model), torch.no_grad():
        whole = model(input_ids=row, use_cache=False).logits[:, columns].float()
        try:
            found = model(input_ids=row[:, columns], use_cache=False, **part_options(columns[None], part))
            wide = whole.dtype == next(model.parameters()).dtype
            bound = (1e-4 if wide else 0.05) * whole.abs().max()
            agrees = bool((found.logits.float() - whole).abs().max() <= bound)
        except (TypeError, ValueError):  # it does not pass the part to its attention
            agrees = False
    free_gathered(model)
    return bool(part.sum(torch.tensor(float(not agrees), device=device)) == 0)
