"""The `distill` recipe: train a model on the distributions of a teacher, on the data or on the model's own answers."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.recipe_spec import RecipeSpec
from crosstune.config.schema import Config
from crosstune.core.errors import naming, raise_all
from crosstune.core.events import Observer, Observers
from crosstune.models.locate import find_local
from crosstune.recipes import sft
from crosstune.recipes.distill.recipe import DistillRecipe, OnPolicyRecipe, check_options
from crosstune.recipes.distill.teacher import Teacher


def open_recipe(config: Config, *, model_folder: Path, observer: Observer | None = None) -> DistillRecipe:
    kind = OnPolicyRecipe if config.on_policy_share else DistillRecipe
    return kind(config, model_folder=model_folder, observer=observer)


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if the teacher does not fit the options or the student, or a row cannot be read; return the skipped checks."""
    raise_all(check_options(config))
    with naming("teacher"):
        is_local = find_local(str(config.teacher)) is not None
    left = sft.check_data(config, model_folder=model_folder)
    if not is_local or model_folder is None:
        return [*left, f"whether the teacher {config.teacher} has the tokens of the student"]
    with naming("teacher"):
        teacher = Teacher(config=config, student=model_folder, observer=Observers())
        teacher.check_tokens(sft.open_tokenizer(config, model_folder))
    return left


SPEC = RecipeSpec(open=open_recipe, check_data=check_data)
