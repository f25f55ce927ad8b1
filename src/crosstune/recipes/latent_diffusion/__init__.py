"""The `latent_diffusion` recipe: train a model that turns sentence vectors into texts and back."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import make_config
from crosstune.config.recipe_spec import RecipeSpec
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Observer
from crosstune.estimate.machine import BackendReport
from crosstune.recipes.latent_diffusion.build import CORPORA, grammar_pairs
from crosstune.recipes.latent_diffusion.corpora import GRAMMAR
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, is_pair_folder, open_pairs
from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe
from crosstune.recipes.latent_diffusion.settings import make_modes

_DEFAULTS = {"dataset": "grammar", "train_type": "full", "lr": 1e-3, "batch_size": 64, "eval_samples": 256}
"""Options with a different default in this recipe, on every backend."""
_MEANINGLESS = {
    "its model starts from random weights": "model_name base_adapter llama_pro_path quantization_backend no_4bit",
    "its tokenizer is in the folder of pairs": "tokenizer chat_template",
    "its data is a folder of pairs, with a validation split and without conversations": (
        "eval_dataset dataset_format columns truncation packing train_on_prompt loading_workers"
    ),
    "it decodes texts of a known length": "max_new_tokens",
}
"""Reason -> options that do not apply to this recipe."""
_MODE_OPTIONS = ("loss_type", "mode_weights", "sequential_schedule")


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    """Return the defaults of options that were not set."""
    reason = "the default of the latent_diffusion recipe"
    return {
        option: Preset(value=value, reason=reason)
        for option, value in _DEFAULTS.items()
        if option not in config.sources
    }


def open_recipe(config: Config, *, model_folder: Path | None, observer: Observer) -> LatentDiffusionRecipe:
    return LatentDiffusionRecipe(config, _open(config))


def check_dataset(name: str) -> None:
    """Raise unless a name is `grammar` or a folder of pairs."""
    folder = Path(name).expanduser()
    if name == GRAMMAR or is_pair_folder(folder):
        return
    source = name if name in CORPORA or folder.exists() else "TEXTS"
    raise UserError(
        f"The latent_diffusion recipe cannot train on {name}.",
        why="it needs a folder of (text, vector) pairs, or the generated corpus `grammar`.",
        do=f"make one: crosstune latents build {source} --out PAIRS; then --dataset PAIRS",
    )


def check_options(config: Config) -> Iterator[UserError]:
    """Yield the problems of options that do not work with this recipe."""
    message = "The latent_diffusion recipe does not support"
    if config.backend == "mlx":
        why, do = "its model is written for torch.", "use --backend mps on a Mac, or cpu"
        yield UserError(f"{message} --backend mlx.", why=why, do=do)
    if config.train_type != "full":
        why = "its model starts from random weights, so there is no base for an adapter."
        do = "use --train_type full, or remove it"
        yield UserError(f"{message} --train_type {config.train_type}.", why=why, do=do)
    for why, options in _MEANINGLESS.items():
        if found := [f"--{option}" for option in options.split() if option in config.sources]:
            have, them = ("have", "them") if len(found) > 1 else ("has", "it")
            useless = f"{' and '.join(found)} {have} no effect with --recipe latent_diffusion."
            yield UserError(useless, why=f"{why}.", do=f"remove {them}")


def next_commands(run: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and commands for the uses of a finished run."""
    given = {name: options[name] for name in _MODE_OPTIONS if name in options}
    modes = make_modes(make_config(**given)).all()
    commands = []
    if modes != {"t2l"}:
        commands.append(("try it", f'crosstune latents decode {run} --text "..." --live'))
    if modes != {"l2t"}:
        commands.append(("encode", f'crosstune latents encode {run} --text "..." --out vectors.npy'))
    if "unconditional" in modes:
        commands.append(("sample", f"crosstune latents sample {run} --live"))
    dataset = options.get("dataset")
    if isinstance(dataset, str) and dataset != GRAMMAR:
        commands.append(("score", f"crosstune latents eval {run} --data {shlex.quote(dataset)}"))
    return commands


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if the pairs cannot be read or are incompatible with the options."""
    _open(config)
    return []


def _open(config: Config) -> PairFolder:
    check_dataset(config.dataset)
    raise_all(check_options(config))
    folder = Path(config.dataset).expanduser()
    pairs = open_pairs(grammar_pairs() if config.dataset == GRAMMAR else folder)
    if config.latent_dim and config.latent_dim != pairs.dim:
        raise UserError(
            f"--latent_dim is {config.latent_dim}, but the vectors of {config.dataset} have {pairs.dim} dimensions.",
            do=f"use --latent_dim {pairs.dim} or remove it, or build the pairs with a different encoder",
        )
    longest = int(pairs.splits["train"].lengths.max())
    if "context_length" in config.sources and longest > config.context_length:
        raise UserError(
            f"Texts of {config.dataset} are longer than --context_length {config.context_length}.",
            why=f"the longest has {longest} tokens; a truncated text would not match its vector.",
            do="build the pairs with --max_tokens and --too_long drop, or use a larger --context_length",
        )
    return pairs


SPEC = RecipeSpec(
    open=open_recipe,
    needs_base_model=False,
    engines=("torch",),
    preset_options=tuple(_DEFAULTS),
    choose_preset=choose_preset,
    check_dataset=check_dataset,
    check_data=check_data,
    check_options=check_options,
    next_commands=next_commands,
)
