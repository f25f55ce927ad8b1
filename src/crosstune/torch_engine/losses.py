"""The loss of causal language models: a sum over supervised tokens and never a mean."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.protocols import IGNORED, Batch


def causal_loss_sum(model: nn.Module, batch: Batch, *, device: torch.device) -> torch.Tensor:
    """Cross entropy in fp32, summed over the supervised tokens of a batch.

    Rows are padded on the right and attention is causal, so no token sees padding and no mask is needed. In packed
    rows positions that start again tell transformers where a document begins, and it keeps attention within each.
    Logits are made only for positions where some row is supervised: most of a prompt never reaches the head.
    """
    input_ids = torch.from_numpy(batch.input_ids).long().to(device)
    targets = torch.from_numpy(batch.targets).long()
    columns = (targets != IGNORED).any(dim=0).nonzero().squeeze(1)
    if columns.numel() == 0:
        columns = torch.zeros(1, dtype=torch.long)
    targets = targets[:, columns].to(device)
    options: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
    if batch.segments.max() > 1:
        ensure_separates_documents(model, device=device)
        options["position_ids"] = torch.from_numpy(batch.positions).long().to(device)
    if takes_logits_to_keep(model):
        logits = model(**options, logits_to_keep=columns.to(device)).logits
    else:
        logits = model(**options).logits[:, columns.to(device)]
    flat = targets.reshape(-1)
    kept = flat != IGNORED
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1])[kept].float(), flat[kept], reduction="sum")


def takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def ensure_separates_documents(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless a document in a packed row is blind to the one before it. Tried once per model: not every kind of
    model in transformers heeds positions, and one that does not would train on wrong text without a word."""
    if getattr(model, "separates_documents", False):
        return
    documents = torch.arange(1, 25, device=device).reshape(3, 8)
    rows = torch.stack([documents[[0, 2]].reshape(-1), documents[[1, 2]].reshape(-1)])
    positions = torch.arange(8, device=device).repeat(2, 2)
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, 8:].float()
    model.train(training)
    if (logits[0] - logits[1]).abs().max() > 1e-4 * logits.abs().max():
        raise UserError(
            f"--packing cannot be used with {type(model).__name__}.",
            why="its attention reaches over the border between documents of a row.",
            do="leave out --packing",
        )
    model.separates_documents = True
