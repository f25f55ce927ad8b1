"""Measure small data for a plan: rows, lengths, steps; and the size of a model that its recipe builds."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.plan import Plan
from crosstune.core.events import Observers
from crosstune.core.protocols import HasLongestRows, Recipe
from crosstune.data.dataset_list import parse_dataset
from crosstune.data.named_datasets import BUNDLED
from crosstune.models.locate import ModelFolder
from crosstune.planner.own_model import OwnModel
from crosstune.planner.predict import DataFacts
from crosstune.runs.open_parts import open_recipe

MOST_BYTES = 4 << 20
"""Larger data is not tokenized for a plan."""


def measure_data(plan: Plan, model: ModelFolder) -> DataFacts | None:
    """Tokenize the data and return its facts; None if it is large, not here, or the recipe has no rows to measure."""
    names = [plan.config.dataset, plan.config.eval_dataset]
    if not all(_is_small(name) for name in names if name):
        return None
    return _facts(open_recipe(plan.config, model, Observers()))


def measure_own_model(plan: Plan) -> OwnModel:
    """Return the size of a model that its recipe builds, and the facts of its data."""
    recipe = open_recipe(plan.config, None, Observers())
    return OwnModel(parameters=recipe.describe().get("model_parameters"), data=_facts(recipe))


def _facts(recipe: Recipe) -> DataFacts | None:
    if not isinstance(recipe, HasLongestRows):
        return None
    described, rows = recipe.describe().get("train", {}), recipe.num_rows()
    return DataFacts(
        num_rows=rows,
        num_steps=recipe.num_steps(),
        longest_row=recipe.longest_row(),
        longest_target=recipe.longest_target(),
        tokens_per_row=described.get("tokens", 0) / max(1, rows) or recipe.longest_row(),
    )


def _is_small(name: str) -> bool:
    total = 0
    for entry in parse_dataset(name):
        path = Path(entry.name).expanduser()
        if entry.name in BUNDLED:
            continue
        if not path.is_file():
            return False
        total += path.stat().st_size
    return total <= MOST_BYTES
