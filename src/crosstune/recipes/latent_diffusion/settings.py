"""Define the model settings (shape and prediction target), the training modes, and the decoding options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.options.latent import MODES, read_schedule, read_shares
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.files.json_fields import TEXT, check_fields, real, whole
from crosstune.files.json_files import read_object, write_json
from crosstune.files.plain_files import UnreadableFile

SETTINGS = "config.json"
_WIDE = 512
"""Hidden size from which heads have 64 columns by default, instead of 32."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The shape and the prediction target of a model, stored in config.json."""

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
        h, c, d, k = self.hidden_size, self.cond_dim, self.latent_dim, self.latent_tokens

        def linear(columns: int, *rows: int) -> int:
            return sum(columns * n + n for n in rows)

        stream = linear(h, 3 * h, h, 4 * h) + linear(4 * h, h) + linear(c, 6 * h) + 2 * (h // self.n_heads)
        times = 2 * (linear(256, c) + linear(c, c)) + linear(2 * c, c) + linear(c, c)
        text = self.vocabulary * (h + 1) + self.max_tokens * h + linear(c, 2 * h)
        latent = linear(d, k * h) + 2 * k * h + linear(c, 2 * h) + linear(k * h, d)
        length = linear(k * h, h) + linear(h, self.max_tokens)
        return self.n_blocks * 2 * stream + times + text + latent + length

    def activation_bytes(
        self, rows: int, *, mean_tokens: float, longest: int, width: int, recompute: bool
    ) -> int:
        """Estimate the bytes that a pass over `rows` keeps for its backward pass; `width` is the bytes of a value."""
        h, latent = self.hidden_size, self.latent_tokens
        # Columns of h: modulations 6, norms and their products 8, queries, keys and values before the norm 3, outputs
        # of attention and feed-forward 4, the feed-forward layer 8; keys, values and attention of padded rows 5.
        block = h * width * rows * (29 * (mean_tokens + latent) + 5 * (longest + latent))
        kept = self.n_blocks * block
        if recompute:
            kept = self.n_blocks * h * width * rows * (mean_tokens + latent) + block
        casts = self.num_parameters() * width if width < 4 else 0  # the weights in the compute dtype
        return int(kept + 12 * rows * mean_tokens * self.vocabulary + casts)  # logits and gradients, in fp32

    def save(self, folder: Path, **facts: Any) -> None:
        write_json(folder / SETTINGS, {"model_type": "latent_diffusion", **asdict(self), **facts})


def make_settings(config: Config, *, vocabulary: int, max_tokens: int, latent_dim: int) -> ModelSettings:
    """Return the settings for the options and the data; raise for an impossible shape."""
    hidden = config.hidden_size
    wanted = config.n_heads or max(1, hidden // (64 if hidden >= _WIDE else 32))
    heads = next((n for n in range(wanted, 0, -1) if hidden % n == 0 and (hidden // n) % 2 == 0), None)
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


def load_settings(folder: Path) -> tuple[ModelSettings, dict[str, Any]]:
    """Return the settings of a trained folder, and the other fields of its config.json."""
    path = folder / SETTINGS
    found = read_object(path)
    if found.get("model_type") != "latent_diffusion":
        raise UnreadableFile(
            path,
            "it does not describe a latent-diffusion model",
            do="pass a run of --recipe latent_diffusion",
        )
    kinds = {"int": whole(1, 2**24 - 1), "float": real(), "str": TEXT}
    rules = {item.name: kinds[str(item.type)] for item in fields(ModelSettings)}
    check_fields(found, rules, source=path, required=tuple(rules))
    settings = ModelSettings(**{name: found[name] for name in rules})
    return settings, {name: value for name, value in found.items() if name not in rules}


@dataclass(frozen=True)
class Modes:
    """The modes of a run: phases of (fractions of the modes, steps). The last phase has no end."""

    phases: tuple[tuple[Mapping[str, float], int], ...]

    def at(self, step: int) -> Mapping[str, float]:
        """Return the fractions of the modes at a step."""
        for shares, steps in self.phases[:-1]:
            if step < steps:
                return shares
            step -= steps
        return self.phases[-1][0]

    def all(self) -> set[str]:
        """Return every mode that is used in some phase."""
        return {mode for shares, _ in self.phases for mode, share in shares.items() if share > 0}


def make_modes(config: Config) -> Modes:
    if config.loss_type == "random":
        return Modes(((read_shares(config.mode_weights), 1),))
    if config.loss_type == "sequential":
        schedule = read_schedule(config.sequential_schedule)
        return Modes(tuple(({mode: 1.0}, steps) for mode, steps in schedule))
    assert config.loss_type in MODES
    return Modes((({config.loss_type: 1.0}, 1),))


OnStep = Callable[[int, int, NDArray[Any]], None]
"""Called with the step, the number of steps, and the tokens after it."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    steps: int = 8
    temperature: float = 0.0
    """0 for the most likely token."""
    guidance: float = 1.0
    num_lengths: int = 1
    """Number of likely lengths to decode; the most confident text is kept."""
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoded:
    tokens: NDArray[Any]
    """(rows, longest), padded with 0."""
    lengths: NDArray[Any]
    scores: NDArray[Any]
    """Probability of each token when it was chosen."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """New texts and their vectors, denoised together."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    vectors: NDArray[np.float32]
    """Normalized to length 1."""
