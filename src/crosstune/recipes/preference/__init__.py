"""The `preference` recipe: train on pairs of a better and a worse answer (DPO and its family), or on labeled answers (KTO)."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.estimate.machine import BackendReport
from crosstune.recipes.preference.losses import make_loss
from crosstune.recipes.preference.open_pairs import open_preferences
from crosstune.recipes.preference.read_pairs import TARGETS
from crosstune.recipes.preference.recipe import PreferenceRecipe
from crosstune.recipes.sft import low_rate


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if a row cannot be read; return the skipped checks."""
    open_preferences(config, paired=make_loss(config).is_paired)
    return [f"whether every answer fits the context: {NOT_TOKENIZED}"]


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    return low_rate(config, what="preferences")


SPEC = RecipeSpec(
    open=PreferenceRecipe,
    needs_first_weights=True,
    columns=TARGETS,
    preset_options=("lr",),
    choose_preset=choose_preset,
    check_data=check_data,
)
