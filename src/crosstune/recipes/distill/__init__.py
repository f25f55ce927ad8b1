"""The `distill` recipe: train a model on the distributions of a teacher, on the data or on the model's own answers."""

from __future__ import annotations

from crosstune.config.recipe_spec import RecipeSpec
from crosstune.recipes.distill.recipe import DistillRecipe
from crosstune.recipes.sft import check_data

SPEC = RecipeSpec(open=DistillRecipe, check_data=check_data)
