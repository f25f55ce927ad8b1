"""Compute single denoising steps in torch: tokens are unmasked, vectors follow DDIM."""

from __future__ import annotations

import torch
from torch.nn import functional

from crosstune.recipes.latent_diffusion.vocabulary import MASK


def unmask(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    *,
    left: torch.Tensor,
    temperature: float,
    seeded: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill in the most confident predictions until `left` tokens of each row are masked.

    Return the tokens, which of them were filled in now, and the probability of each prediction.
    """
    masked = tokens == MASK
    chosen, sure = choose(logits, temperature=temperature, seeded=seeded)
    order = torch.where(masked, sure, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    opened = masked & (order < (masked.sum(1) - left)[:, None])
    return torch.where(opened, chosen, tokens), opened, sure


def choose(
    logits: torch.Tensor, *, temperature: float, seeded: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each place, the likeliest or a drawn one, and its probability."""
    chances = (logits / (temperature or 1.0)).softmax(-1)
    if temperature:
        chosen = torch.multinomial(chances.flatten(0, -2), 1, generator=seeded).view(chances.shape[:-1])
    else:
        chosen = chances.argmax(-1)
    return chosen, chances.gather(-1, chosen[..., None])[..., 0]


def ddim_step(
    noisy: torch.Tensor, clean: torch.Tensor, *, now: torch.Tensor, after: torch.Tensor
) -> torch.Tensor:
    """Move noisy vectors from one time to the next, towards the clean vectors that are predicted."""
    alpha, sigma = signal_noise(now)
    next_alpha, next_sigma = signal_noise(after)
    return next_alpha * clean + next_sigma * (noisy - alpha * clean) / sigma


def at_data_norm(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors to the norm that every vector of the data has inside the model."""
    return functional.normalize(vectors, dim=-1) * vectors.shape[-1] ** 0.5


def signal_noise(time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the clean vector and of the noise, with a column each."""
    angle = 0.5 * torch.pi * time.float()[:, None]
    return angle.cos(), angle.sin()


def to_clean(predicted: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the clean vector that a prediction stands for."""
    if kind == "x0":
        return predicted
    alpha, sigma = signal_noise(time)
    if kind == "v":
        return alpha * noisy - sigma * predicted
    return (noisy - sigma * predicted) / alpha.clamp(min=1e-3)
