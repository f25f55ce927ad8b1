"""List the commands that use a run, where its recipe has some of its own."""

from __future__ import annotations

import shlex
from pathlib import Path

from crosstune.core.json_files import read_json
from crosstune.core.names import load_plugin, plugin_names


def next_commands(folder: Path, *, shown: str | None = None) -> list[tuple[str, str]]:
    """Return a label and a command each, from the function `next_commands` of the run's recipe; none without it.

    `shown` is the path to print instead of the whole one.
    """
    options = read_json(folder / "plan.json").get("options")
    name = options.get("recipe") if isinstance(options, dict) else None
    if not isinstance(name, str) or name not in plugin_names("crosstune.recipes"):
        return []
    recipe = load_plugin("crosstune.recipes", name, kind="recipe")
    if not hasattr(recipe, "next_commands"):
        return []
    commands: list[tuple[str, str]] = recipe.next_commands(shlex.quote(shown or str(folder)), options)
    return commands
