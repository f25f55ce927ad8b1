"""Options for the recipe latent_diffusion: the model's size, the modes, the losses, and decoding in evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import LATENT_DIFFUSION, TORCH_ENGINE
from crosstune.config.option import OnResume, option

MODES = ("l2t", "t2l", "unconditional")
"""Latent to text, text to latent, and both from noise."""


def read_shares(text: str) -> dict[str, float]:
    """Return mode -> number from a text such as l2t:0.65,t2l:0.35; raise ValueError for another form."""
    shares: dict[str, float] = {}
    for item in text.split(","):
        mode, _, number = item.strip().partition(":")
        if mode not in MODES or mode in shares:
            raise ValueError(f"there is no further mode {mode}")
        shares[mode] = float(number)
        if not 0 <= shares[mode] < 1e12:
            raise ValueError(f"{number} is not a share")
    if sum(shares.values()) <= 0:
        raise ValueError("all of them are 0")
    return shares


def read_schedule(text: str) -> list[tuple[str, int]]:
    """Return (mode, steps) in their order from a text such as l2t:1000,t2l:500; raise ValueError for another form."""
    phases: list[tuple[str, int]] = []
    for item in text.split(","):
        mode, _, number = item.strip().partition(":")
        if mode not in MODES or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{item} is not a mode with a number of steps")
        phases.append((mode, int(number)))
    return phases


def _check_shares(value: str) -> str | None:
    try:
        read_shares(value)
    except ValueError:
        return f"modes ({', '.join(MODES)}) with their shares, as in l2t:0.65,t2l:0.25,unconditional:0.1"
    return None


def _check_schedule(value: str) -> str | None:
    try:
        read_schedule(value)
    except ValueError:
        return f"modes ({', '.join(MODES)}) with their steps, as in l2t:1000,t2l:500"
    return None


_NEEDS = (LATENT_DIFFUSION,)


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    loss_type: str = option(
        "l2t",
        "What is learned: text from a latent (l2t), a latent from text (t2l), both from noise (unconditional), a random "
        "mixture of them (random, see mode_weights), or one after the other (sequential, see sequential_schedule)",
        choices=(*MODES, "random", "sequential"),
        needs=_NEEDS,
    )
    mode_weights: str = option(
        "l2t:0.65,t2l:0.25,unconditional:0.1",
        "Shares of the modes with --loss_type random; each row of a batch draws its own",
        check=_check_shares,
        joins_items=":",
        needs=_NEEDS,
    )
    sequential_schedule: str = option(
        "l2t:1000,t2l:500,unconditional:500",
        "Modes and their steps with --loss_type sequential; the last one goes on until the end",
        check=_check_schedule,
        joins_items=":",
        needs=_NEEDS,
    )
    cfg_dropout_prob: float = option(
        0.1,
        "Share of rows that are trained without their condition, for classifier-free guidance",
        low=0,
        high=1,
        needs=_NEEDS,
    )
    latent_noise: float = option(
        0.0,
        "Standard deviation of the noise added to the vectors that texts are predicted from, in units of their own; against "
        "memorising a small corpus",
        low=0,
        high=100,
        needs=_NEEDS,
    )
    text_loss_weight: float = option(
        1.0, "Weight of the cross entropy of masked tokens", low=0, high=1e6, needs=_NEEDS
    )
    latent_loss_weight: float = option(0.1, "Weight of the latent loss", low=0, high=1e6, needs=_NEEDS)
    latent_loss: str = option(
        "cosine",
        "Latent loss: 1 - cosine, or the mean squared error of vectors with unit variance",
        choices=("cosine", "mse"),
        needs=_NEEDS,
    )
    latent_parameterization: str = option(
        "x0",
        "What the latent head predicts: the clean vector (x0), v, or the noise (epsilon)",
        choices=("x0", "v", "epsilon"),
        needs=_NEEDS,
    )
    hidden_size: int = option(192, "Width of the model", low=2, high=2**16, needs=_NEEDS)
    n_blocks: int = option(4, "Number of joint blocks", low=1, high=1024, needs=_NEEDS)
    n_heads: int = option(
        0, "Attention heads; 0 for heads of 64, or 32 in a narrow model", low=0, high=1024, needs=_NEEDS
    )
    cond_dim: int = option(
        0, "Width of the time embedding; 0 for hidden_size", low=0, high=2**16, needs=_NEEDS
    )
    latent_tokens: int = option(
        4, "Number of tokens that a latent vector becomes inside the model", low=1, high=256, needs=_NEEDS
    )
    latent_dim: int = option(
        0,
        "Dimension of the latent vectors, checked against the data; 0 for that of the data",
        low=0,
        high=2**20,
        needs=_NEEDS,
    )
    dropout: float = option(
        0.0,
        "Dropout after attention and feed-forward layers of the recipe's own model",
        low=0,
        high=0.99,
        needs=_NEEDS,
    )
    ema_decay: float = option(
        0.0,
        "Keep a moving average of the trained weights with this decay, and evaluate and save that; 0 for none. It lags behind by about 1 / (1 - decay) steps: let those be 2 to 3 % of the training, as 0.98 for 2,000 steps and 0.999 for 40,000",
        low=0,
        high=0.999999,
        needs=(TORCH_ENGINE,),
    )
    decode_steps: int = option(
        8,
        "Denoising steps when an evaluation decodes held-out latents",
        low=1,
        high=10_000,
        needs=_NEEDS,
        on_resume=OnResume.FREE,
    )
    guidance: float = option(
        1.0,
        "Classifier-free guidance when an evaluation decodes; 1 for none",
        low=0,
        high=100,
        needs=_NEEDS,
        on_resume=OnResume.FREE,
    )
