"""The loss of causal language models: a sum over supervised tokens and never a mean."""

from __future__ import annotations

import inspect

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.core.protocols import IGNORED, Batch


def causal_loss_sum(model: nn.Module, batch: Batch, *, device: torch.device) -> torch.Tensor:
    """Cross entropy in fp32, summed over the supervised tokens of a batch.

    Rows are padded on the right and attention is causal, so no token sees padding and no mask is needed.
    Logits are made only for positions where some row is supervised: most of a prompt never reaches the head.
    """
    input_ids = torch.from_numpy(batch.input_ids).long().to(device)
    targets = torch.from_numpy(batch.targets).long()
    columns = (targets != IGNORED).any(dim=0).nonzero().squeeze(1)
    if columns.numel() == 0:
        columns = torch.zeros(1, dtype=torch.long)
    targets = targets[:, columns].to(device)
    if takes_logits_to_keep(model):
        logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=columns.to(device)).logits
    else:
        logits = model(input_ids=input_ids, use_cache=False).logits[:, columns.to(device)]
    flat = targets.reshape(-1)
    kept = flat != IGNORED
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1])[kept].float(), flat[kept], reduction="sum")


def takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
