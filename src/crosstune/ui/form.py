"""Make the form of a new run from the options, and turn its values into a command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import load_config
from crosstune.config.option import OnResume, Option
from crosstune.config.schema import option_list, options_by_name
from crosstune.config.table import describe_option
from crosstune.core.errors import ConfigError, UserError
from crosstune.models.bundled import BUNDLED
from crosstune.ui.jobs import command_line

_FIRST = (
    *("recipe", "model_name", "dataset", "eval_dataset", "name", "train_type", "num_epochs", "max_steps"),
    *("lr", "batch_size", "context_length", "packing", "lora_rank", "precision", "eval_steps", "save_steps"),
)
_FIRST_OF_RECIPE = {
    "preference": ("preference_loss", "beta", "reference"),
    "rl": ("reward", "rl_loss", "num_generations", "max_new_tokens"),
    "distill": ("teacher", "distill_loss", "teacher_top_k", "on_policy_share"),
    "judge": ("verdict", "score_scale", "test_dataset"),
    "latent_diffusion": ("mmdit_config", "latent_encoder"),
}
_NOT_IN_FORM = ("output_dir", "resume")
_LONGEST_VALUE = 4096


def describe_form() -> dict[str, Any]:
    """Return every option with its group, kind of value and default, in the order of the form."""
    found = [_describe(option) for option in option_list() if option.name not in _NOT_IN_FORM]
    return {"options": found, "models": list(BUNDLED)}


def _describe(option: Option) -> dict[str, Any]:
    facts = describe_option(option)
    named = [name for name, names in _FIRST_OF_RECIPE.items() if option.name in names]
    return {
        "name": option.name,
        "group": option.group,
        "text": option.text,
        "takes": facts["takes"],
        "needs": facts["has_effect"],
        "kind": option.type.__name__,
        "choices": option.choices,
        "default": "" if option.default is None else facts["default"],
        "recipes": sorted({name for condition in option.needs for name in condition.recipes}),
        "first": _FIRST.index(option.name) + 1 if option.name in _FIRST else 0,
        "first_of": named,
        "one_start": OnResume.ONE_START in option.on_resume,
    }


def read_words(options: Any) -> list[str]:
    """Return the flags of the values of a form, without empty ones."""
    if not isinstance(options, Mapping):
        raise UserError("The request has no options.")
    words = []
    for name, value in options.items():
        text = str(value)
        is_known = name in options_by_name() and name not in _NOT_IN_FORM
        if not is_known or len(text) > _LONGEST_VALUE or "\0" in text:
            raise UserError(f"The option {name!s:.80} cannot have this value.", do="see: crosstune options")
        if text.strip():
            words += [f"--{name}={text}"] if text.startswith("--") else [f"--{name}", text]
    return words


def check_form(options: Any, *, output_dir: Path) -> dict[str, Any]:
    """Return the command of a form, and everything that is wrong with its values."""
    words = read_words(options)
    problems: list[UserError] = []
    try:
        load_config(words)
    except ConfigError as error:
        problems = error.problems
    except UserError as error:
        problems = [error]
    if str(options.get("name", "")).strip().startswith("."):
        problems = [*problems, UserError("The name cannot begin with a dot.", why="such a folder is hidden.")]
    rows = [
        {"option": _named_in(each, options), "message": each.message, "why": each.why, "do": each.do}
        for each in problems
    ]
    return {"command": command_line(["train", *words, "--output_dir", str(output_dir)]), "problems": rows}


def _named_in(problem: UserError, options: Mapping[str, Any]) -> str:
    return next((name for name in options if name in problem.message.replace("-", "_")), "")


def free_name(parent: Path, *, like: str = "run") -> str:
    """Return a name for a new run that no folder has."""
    number = 1
    while os.path.lexists(parent / f"{like}-{number}"):
        number += 1
    return f"{like}-{number}"


def reserve_name(parent: Path) -> str:
    """Make the folder of a new run, which no other start takes, and return its name."""
    while True:
        with contextlib.suppress(FileExistsError):
            (parent / (name := free_name(parent))).mkdir(parents=True)
            return name
