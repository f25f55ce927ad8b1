"""Options for the recipe latent_diffusion: the model's size, the modes, the losses, and decoding in evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def _check(read: Callable[[str], Any], wanted: str) -> Callable[[str], str | None]:
    """Return a check that says what is wanted where a text cannot be read."""

    def check(value: str) -> str | None:
        try:
            read(value)
        except ValueError:
            return f"modes ({', '.join(MODES)}) with their {wanted}"
        return None

    return check


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
        check=_check(read_shares, "shares, as in l2t:0.65,t2l:0.25,unconditional:0.1"),
        joins_items=":",
        needs=_NEEDS,
    )
    sequential_schedule: str = option(
        "l2t:1000,t2l:500,unconditional:500",
        "Modes and their steps with --loss_type sequential; the last one lasts until the end",
        check=_check(read_schedule, "steps, as in l2t:1000,t2l:500"),
        joins_items=":",
        needs=_NEEDS,
    )
    cfg_dropout_prob: float = option(
        0.1,
        "Share of rows trained without their condition, for classifier-free guidance",
        low=0,
        high=1,
        needs=_NEEDS,
    )
    latent_noise: float = option(
        0.0,
        "Standard deviation of noise on the input vectors of l2t, which have unit variance; against memorising a small corpus",
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
        4, "Number of tokens that represent a latent vector inside the model", low=1, high=256, needs=_NEEDS
    )
    latent_dim: int = option(
        0,
        "Dimension of the latent vectors, checked against the data; 0 to use the dimension of the data",
        low=0,
        high=2**20,
        needs=_NEEDS,
    )
    dropout: float = option(
        0.0,
        "Dropout after attention and feed-forward layers",
        low=0,
        high=0.99,
        needs=_NEEDS,
    )
    ema_decay: float = option(
        0.0,
        "Decay of a moving average of the trained weights, which is evaluated and saved; 0 for none. It lags by about 1 / (1 - decay) steps, which should be 2 to 3 % of the training: 0.98 for 2,000 steps, 0.999 for 40,000",
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
