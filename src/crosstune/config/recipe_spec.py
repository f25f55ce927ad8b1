"""Define the interface of a recipe, and load a recipe by file name."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.names import load_plugin, plugin_names
from crosstune.estimate.machine import BackendReport
from crosstune.files.json_files import read_json

if TYPE_CHECKING:  # numpy takes time to load
    from crosstune.core.protocols import Recipe

PACKAGE = "crosstune.recipes"
NOT_TOKENIZED = "nothing is tokenized"
"""The end of a skipped check's message; `plan` makes the check later if it tokenizes the data."""


@dataclass(frozen=True, kw_only=True)
class RecipeSpec:
    """The entry points of a recipe; its file defines one as `SPEC`."""

    open: Callable[..., Recipe]
    """(config, *, model_folder, observer): open the data. The folder is None for a recipe that builds its own model."""
    needs_base_model: bool = True
    """False for a recipe that builds its own model."""
    engines: tuple[str, ...] = ()
    """The supported engines, for `--backend auto`; empty: all."""
    opens_judges: bool = False
    """True if the recipe scores answers with trained judges: `open` also takes `open_judge`, which finds one by its run."""
    needs_first_weights: bool = False
    """True if the recipe compares the model with its initial weights: a resumed run still needs --base_adapter."""
    data_options: tuple[str, ...] = ("dataset", "eval_dataset")
    """The options that specify data."""
    columns: Sequence[str] | None = None
    """The columns that --columns may map to; None: the columns of conversations."""
    preset_options: tuple[str, ...] = ()
    """The options that `choose_preset` may set."""
    choose_preset: Callable[[Config, BackendReport], Mapping[str, Preset]] | None = None
    """Return values for unset options whose default differs on this backend."""
    check_dataset: Callable[[str], None] | None = None
    """Raise a UserError for a dataset that the recipe cannot read; None: a dataset is a file of rows or documents."""
    check_data: Callable[..., list[str]] | None = None
    """(config, *, model_folder): raise a UserError for a bad row; return the skipped checks. The folder is None if the
    model is not local."""
    check_files: Callable[[Config], None] | None = None
    """Raise a UserError for an option of the recipe that names a missing or unreadable file. Not called for a different machine."""
    check_options: Callable[[Config], Iterable[UserError]] | None = None
    """Return a problem for each option that a recipe with its own model does not support."""
    next_commands: Callable[[str, Mapping[str, Any]], list[tuple[str, str]]] | None = None
    """Return labels and commands for using a finished run, from its quoted path and resolved options."""


def load_recipe(name: str) -> RecipeSpec:
    """Return the spec of a recipe; raise a UserError with the existing names if it is unknown."""
    spec: RecipeSpec = load_plugin(PACKAGE, name, kind="recipe").SPEC
    return spec


def trained_name(config: Config) -> str:
    """Return the name of the model that a run trains, or of the recipe if it builds its own."""
    # The default recipe is not loaded, so that a command quickly says what it does.
    return (
        config.model_name
        if config.recipe == "sft" or load_recipe(config.recipe).needs_base_model
        else config.recipe
    )


def recipe_names() -> list[str]:
    return plugin_names(PACKAGE)


def next_commands(run: str, options: Any) -> list[tuple[str, str]]:
    """Return labels and commands for using a run, from its path and resolved options."""
    name = options.get("recipe") if isinstance(options, dict) else None
    recipe = load_recipe(name) if name in recipe_names() else None
    if recipe is None or recipe.next_commands is None:
        return []
    return recipe.next_commands(shlex.quote(run), options)


def read_options(folder: Path) -> Any:
    """Return a run's resolved options from its folder."""
    return read_json(folder / "plan.json").get("options")
