"""Latent diffusion: a model that turns sentence vectors into texts and back, trained on (text, vector) pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.config.facts import Preset
from crosstune.config.load import cache_override
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.machine import BackendReport

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.pair_folder import PairFolder
    from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe

NEEDS_BASE_MODEL = False
_DEFAULTS = {"dataset": "grammar", "train_type": "full", "lr": 1e-3, "batch_size": 64, "eval_samples": 256}
"""Options whose default is another one with this recipe, on every backend."""
PRESET_OPTIONS = tuple(_DEFAULTS)


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    """Return option -> value and reason, for options that were not set."""
    reason = "the default of the recipe latent_diffusion"
    return {
        option: Preset(value=value, reason=reason)
        for option, value in _DEFAULTS.items()
        if option not in config.asked
    }


def open_recipe(config: Config, *, model_folder: Path | None, observer: Observer) -> LatentDiffusionRecipe:
    from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe

    return LatentDiffusionRecipe(config, _open(config))


def check_dataset(name: str) -> None:
    """Raise unless a name can be the data of this recipe: `grammar`, or a folder of pairs."""
    from crosstune.recipes.latent_diffusion.build import CORPORA
    from crosstune.recipes.latent_diffusion.pair_folder import is_pair_folder

    folder = Path(name).expanduser()
    if name == "grammar" or is_pair_folder(folder):
        return
    source = name if name in CORPORA or folder.exists() else "TEXTS"
    raise UserError(
        f"The recipe latent_diffusion cannot train on {name}.",
        why="it needs a folder of (text, vector) pairs, or the generated corpus `grammar`.",
        do=f"make one: crosstune latents build {source} --out PAIRS; then --dataset PAIRS",
    )


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if the pairs cannot be read or do not fit the options."""
    _open(config)
    return []


def _open(config: Config) -> PairFolder:
    from crosstune.recipes.latent_diffusion.grammar import GRAMMAR, grammar_pairs
    from crosstune.recipes.latent_diffusion.pair_folder import open_pairs

    check_dataset(config.dataset)
    if config.train_type != "full":
        raise UserError(
            f"The recipe latent_diffusion does not train with --train_type {config.train_type}.",
            why="its model starts from random weights, so there is nothing that an adapter could be added to.",
            do="use --train_type full, or leave it out",
        )
    folder = Path(config.dataset).expanduser()
    pairs = open_pairs(grammar_pairs(cache_override()) if config.dataset == GRAMMAR else folder)
    if config.latent_dim and config.latent_dim != pairs.dim:
        raise UserError(
            f"--latent_dim is {config.latent_dim}, but the vectors of {config.dataset} have {pairs.dim} dimensions.",
            do=f"use --latent_dim {pairs.dim} or leave it out, or build the pairs with another encoder",
        )
    if "context_length" in config.asked and int(pairs.splits["train"].lengths.max()) > config.context_length:
        raise UserError(
            f"Texts of {config.dataset} are longer than --context_length {config.context_length}.",
            why=f"the longest has {int(pairs.splits['train'].lengths.max())} tokens; cut short, it would not be the text of "
            "its vector.",
            do="build the pairs with --max_tokens and --too_long drop, or use a larger --context_length",
        )
    return pairs
