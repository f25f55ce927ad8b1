"""List the commands that use a run, as its recipe declares them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from crosstune.config.recipe_spec import load_recipe, recipe_names
from crosstune.core.json_files import read_json


def next_commands(run: str, options: Any) -> list[tuple[str, str]]:
    """Return a label and a command each, for a run's path and its resolved options; empty if its recipe has none."""
    name = options.get("recipe") if isinstance(options, dict) else None
    recipe = load_recipe(name) if name in recipe_names() else None
    if recipe is None or recipe.next_commands is None:
        return []
    return recipe.next_commands(shlex.quote(run), options)


def read_options(folder: Path) -> Any:
    """Return the resolved options of a run from its folder."""
    return read_json(folder / "plan.json").get("options")
