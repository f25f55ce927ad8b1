"""Open the recipe of a run with its data, and with judges if it rewards answers."""

from __future__ import annotations

from typing import Any

from crosstune.config.recipe_spec import load_recipe
from crosstune.config.schema import Config
from crosstune.core.events import Observer
from crosstune.core.protocols import Recipe
from crosstune.models.locate import ModelFolder


def open_recipe(config: Config, model: ModelFolder | None, observer: Observer) -> Recipe:
    """Open the recipe of a configuration with its data."""
    folder = model.path if model is not None else None
    spec, options = load_recipe(config.recipe), dict[str, Any]()
    if spec.opens_judges:
        from crosstune.runs.judges import find_judge_scorer  # most runs need no judge

        options["open_judge"] = find_judge_scorer
    return spec.open(config, model_folder=folder, observer=observer, **options)
