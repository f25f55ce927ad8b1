"""Options of the latent_diffusion recipe: model size, modes, losses, decoding in evaluations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from crosstune.config.conditions import EVALUATION, Condition, Values, with_recipe
from crosstune.config.option import OnResume, option

LATENT_DIFFUSION = with_recipe("latent_diffusion")

MODES = ("l2t", "t2l", "unconditional")
"""Latent to text, text to latent, and both from noise."""


def read_shares(text: str) -> dict[str, float]:
    """Return mode -> weight from a string such as l2t:0.65,t2l:0.35; raise ValueError if malformed."""
    shares: dict[str, float] = {}
    for item in text.split(","):
        mode, _, number = item.strip().partition(":")
        if mode not in MODES or mode in shares:
            raise ValueError(f"{mode} is unknown or given twice")
        shares[mode] = float(number)
        if not 0 <= shares[mode] < 1e12:
            raise ValueError(f"{number} is not a weight")
    if sum(shares.values()) <= 0:
        raise ValueError("all weights are 0")
    return shares


def read_schedule(text: str) -> list[tuple[str, int]]:
    """Return (mode, steps) in order from a string such as l2t:1000,t2l:500; raise ValueError if malformed."""
    phases: list[tuple[str, int]] = []
    for item in text.split(","):
        mode, _, number = item.strip().partition(":")
        if mode not in MODES or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"{item} is not a mode with a number of steps")
        phases.append((mode, int(number)))
    return phases


def _check(read: Callable[[str], Any], wanted: str) -> Callable[[str], str | None]:
    """Return a check for a string that `read` parses."""

    def check(value: str) -> str | None:
        try:
            read(value)
        except ValueError:
            return f"modes ({', '.join(MODES)}) with their {wanted}"
        return None

    return check


def modes_in(now: Values) -> set[str]:
    """Return the modes that a run trains, from its options."""
    if now["loss_type"] == "random":
        return {mode for mode, share in read_shares(now["mode_weights"]).items() if share > 0}
    if now["loss_type"] == "sequential":
        return {mode for mode, _ in read_schedule(now["sequential_schedule"])}
    return {now["loss_type"]}


def _with_modes(*modes: str) -> Condition:
    """Require one of these modes."""
    return Condition(
        " or ".join(modes), lambda now: bool({*modes} & modes_in(now)), "with --loss_type {loss_type}"
    )


def _with_loss_type(name: str) -> Condition:
    return Condition(f"`--loss_type {name}`", lambda now: now["loss_type"] == name)


_option = partial(option, needs=(LATENT_DIFFUSION,))
_from_text = partial(option, needs=(LATENT_DIFFUSION, _with_modes("t2l", "unconditional")))
_to_text = partial(option, needs=(LATENT_DIFFUSION, _with_modes("l2t", "unconditional")))
_decoding = partial(
    option,
    needs=(LATENT_DIFFUSION, EVALUATION, _with_modes("l2t", "unconditional")),
    on_resume=OnResume.FREE,
)
_from_latent = partial(option, needs=(LATENT_DIFFUSION, _with_modes("l2t")))


@dataclass(frozen=True, kw_only=True)
class LatentOptions:
    loss_type: str = _option(
        "l2t",
        "Training task: text from a latent (l2t), a latent from text (t2l), both from noise (unconditional), a random "
        "mixture (random, see mode_weights), or one after the other (sequential, see sequential_schedule)",
        choices=(*MODES, "random", "sequential"),
    )
    mode_weights: str = _option(
        "l2t:0.65,t2l:0.25,unconditional:0.1",
        "Weights of the modes with --loss_type random; the mode is drawn per row",
        check=_check(read_shares, "weights, as in l2t:0.65,t2l:0.25,unconditional:0.1"),
        joins_items=":",
        needs=(LATENT_DIFFUSION, _with_loss_type("random")),
    )
    sequential_schedule: str = _option(
        "l2t:1000,t2l:500,unconditional:500",
        "Modes and their numbers of steps with --loss_type sequential; the last mode lasts until the end",
        check=_check(read_schedule, "numbers of steps, as in l2t:1000,t2l:500"),
        joins_items=":",
        needs=(LATENT_DIFFUSION, _with_loss_type("sequential")),
    )
    cfg_dropout_prob: float = _option(
        0.1, "Fraction of rows trained without their condition, for classifier-free guidance", high=1
    )
    latent_noise: float = _from_latent(
        0.0,
        "Standard deviation of noise added to the input vectors of l2t (unit variance), to reduce memorization of a small corpus",
        high=100,
    )
    text_loss_weight: float = _to_text(1.0, "Weight of the cross-entropy on masked tokens", high=1e6)
    latent_loss_weight: float = _from_text(0.1, "Weight of the latent loss", high=1e6)
    latent_loss: str = _from_text(
        "cosine",
        "Latent loss: 1 - cosine, or the mean squared error between vectors of unit variance",
        choices=("cosine", "mse"),
    )
    latent_parameterization: str = _from_text(
        "x0",
        "Prediction target of the latent head: the clean vector (x0), the velocity (v) or the noise (epsilon)",
        choices=("x0", "v", "epsilon"),
    )
    hidden_size: int = _option(192, "Width of the model", low=2, high=2**16)
    n_blocks: int = _option(4, "Number of joint blocks", low=1, high=1024)
    n_heads: int = _option(
        0, "Number of attention heads; 0: heads of size 64, or 32 in a narrow model", high=1024
    )
    cond_dim: int = _option(0, "Width of the time embedding; 0: hidden_size", high=2**16)
    latent_tokens: int = _option(
        4, "Number of tokens that represent a latent vector in the model", low=1, high=256
    )
    latent_dim: int = _option(0, "Dimension of the latent vectors; 0: read from the data", high=2**20)
    dropout: float = _option(0.0, "Dropout after attention and feed-forward layers", high=0.99)
    decode_steps: int = _decoding(
        8, "Denoising steps for decoding held-out latents in an evaluation", low=1, high=10_000
    )
    guidance: float = _decoding(
        1.0, "Classifier-free guidance for decoding in an evaluation; 1: none", high=100
    )
