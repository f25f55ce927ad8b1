"""List the commands that use a run, where its recipe has some of its own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from crosstune.core.json_files import read_json
from crosstune.core.names import load_plugin, plugin_names


def next_commands(run: str, options: Any) -> list[tuple[str, str]]:
    """Return a label and a command each for a run's path and its resolved options, from the function `next_commands` of
    its recipe; none without it."""
    name = options.get("recipe") if isinstance(options, dict) else None
    if not isinstance(name, str) or name not in plugin_names("crosstune.recipes"):
        return []
    recipe = load_plugin("crosstune.recipes", name, kind="recipe")
    if not hasattr(recipe, "next_commands"):
        return []
    commands: list[tuple[str, str]] = recipe.next_commands(shlex.quote(run), options)
    return commands


def read_options(folder: Path) -> Any:
    """Return the resolved options of a run as its folder has them."""
    return read_json(folder / "plan.json").get("options")
