"""Compute the bound on the likelihood of texts given their vectors, in nats per token."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from crosstune.recipes.latent_diffusion.noise import draw
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.vocabulary import MASK


def sum_of_nats(
    model: LatentDiffusionModel,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    latents: torch.Tensor,
    *,
    key: tuple[int, ...],
) -> float:
    """Return the sum over texts of the cross entropy of masked tokens divided by the share that was masked: an unbiased
    estimate of the bound, with one time for each text. `latents` have unit variance."""
    drawn = draw(
        lengths.cpu().numpy().astype(np.int32),
        max_tokens=tokens.shape[1],
        dim=latents.shape[1],
        shares={"l2t": 1.0},
        dropped=0.0,
        key=key,
    )
    masked = torch.from_numpy(drawn.masked).to(tokens.device)
    time = torch.from_numpy(drawn.text_time).to(tokens.device)
    output = model(torch.where(masked, MASK, tokens), lengths, latents, time, torch.zeros_like(time))
    assert output.logits is not None, "the model was trained without predicting text"
    each = functional.cross_entropy(output.logits.float().transpose(1, 2), tokens.long(), reduction="none")
    return float((each * masked / time[:, None]).sum())
