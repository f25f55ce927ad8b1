"""Define the settings of a latent-diffusion model: its shape and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from crosstune.config.options.latent import MODES, read_schedule, read_shares
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.json_files import read_object, write_json
from crosstune.core.plain_files import UnreadableFile

SETTINGS = "config.json"
_WIDE = 512
"""From this width on, heads have 64 columns by default."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Everything that decides the weights of a model."""

    vocabulary: int
    max_tokens: int
    latent_dim: int
    hidden_size: int
    n_blocks: int
    n_heads: int
    cond_dim: int
    latent_tokens: int
    latent_parameterization: str = "x0"
    dropout: float = 0.0

    def num_parameters(self) -> int:
        """Return the number of parameters of the model that these settings describe."""
        h, c, d, k = self.hidden_size, self.cond_dim, self.latent_dim, self.latent_tokens

        def linear(columns: int, rows: int) -> int:
            return columns * rows + rows

        head = h // self.n_heads
        stream = (
            linear(h, 3 * h)
            + linear(h, h)
            + linear(h, 4 * h)
            + linear(4 * h, h)
            + linear(c, 6 * h)
            + 2 * head
        )
        times = 2 * (linear(256, c) + linear(c, c)) + linear(2 * c, c) + linear(c, c)
        text = self.vocabulary * (h + 1) + self.max_tokens * h + linear(c, 2 * h)
        latent = linear(d, k * h) + 2 * k * h + linear(c, 2 * h) + linear(k * h, d)
        length = linear(k * h, h) + linear(h, self.max_tokens)
        return self.n_blocks * 2 * stream + times + text + latent + length

    def save(self, folder: Path, **facts: Any) -> None:
        write_json(folder / SETTINGS, {"model_type": "latent_diffusion", **asdict(self), **facts})


def make_settings(config: Config, *, vocabulary: int, max_tokens: int, latent_dim: int) -> ModelSettings:
    """Return the settings for some data; raise for a shape that is not possible."""
    hidden = config.hidden_size
    wanted = config.n_heads or max(1, hidden // (64 if hidden >= _WIDE else 32))
    heads = fitting_heads(hidden, wanted)
    if heads is None or (heads != wanted and config.n_heads and config.strict):
        raise UserError(
            f"--hidden_size {hidden} does not divide into {wanted} heads.",
            why="each head needs the same even number of columns.",
            do="use a multiple of 64, or set --n_heads",
        )
    return ModelSettings(
        vocabulary=vocabulary,
        max_tokens=max_tokens,
        latent_dim=latent_dim,
        hidden_size=hidden,
        n_blocks=config.n_blocks,
        n_heads=heads,
        cond_dim=config.cond_dim or hidden,
        latent_tokens=config.latent_tokens,
        latent_parameterization=config.latent_parameterization,
        dropout=config.dropout,
    )


def fitting_heads(hidden: int, wanted: int) -> int | None:
    """Return the largest number of heads up to `wanted` that divides the width into even parts."""
    return next((n for n in range(wanted, 0, -1) if hidden % n == 0 and (hidden // n) % 2 == 0), None)


def load_settings(folder: Path) -> tuple[ModelSettings, dict[str, Any]]:
    """Return the settings of a trained folder, and the other facts in its config.json."""
    path = folder / SETTINGS
    found = read_object(path)
    names = {item.name: item for item in fields(ModelSettings)}
    if found.get("model_type") != "latent_diffusion":
        raise UnreadableFile(
            path,
            "it does not describe a latent-diffusion model",
            do="give a run of --recipe latent_diffusion",
        )
    for name, item in names.items():
        kinds: tuple[type, ...] = {"int": (int,), "float": (int, float), "str": (str,)}[str(item.type)]
        if isinstance(found.get(name), bool) or not isinstance(found.get(name), kinds):
            raise UnreadableFile(path, f"{name} is missing or not a {item.type}")
        if kinds == (int,) and not 0 < found[name] < 2**24:
            raise UnreadableFile(path, f"{name} cannot be {found[name]}")
    settings = ModelSettings(**{name: found[name] for name in names})
    return settings, {name: value for name, value in found.items() if name not in names}


@dataclass(frozen=True, kw_only=True)
class Modes:
    """Give the modes that a step trains."""

    phases: tuple[tuple[str, int], ...] = ()
    shares: Mapping[str, float] | None = None

    def at(self, step: int) -> Mapping[str, float]:
        """Return the shares of the modes in a step."""
        if self.shares is not None:
            return self.shares
        for mode, steps in self.phases[:-1]:
            if step < steps:
                return {mode: 1.0}
            step -= steps
        return {self.phases[-1][0]: 1.0}

    def all(self) -> set[str]:
        """Return every mode that is trained at some step."""
        if self.shares is not None:
            return {mode for mode, share in self.shares.items() if share > 0}
        return {mode for mode, _ in self.phases}


def make_modes(config: Config) -> Modes:
    if config.loss_type == "random":
        return Modes(shares=read_shares(config.mode_weights))
    if config.loss_type == "sequential":
        return Modes(phases=tuple(read_schedule(config.sequential_schedule)))
    assert config.loss_type in MODES
    return Modes(phases=((config.loss_type, 1),))
