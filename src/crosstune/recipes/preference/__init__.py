"""The `preference` recipe: train on pairs of a better and a worse answer (DPO and its family), or on labelled answers (KTO)."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS, TRAIN_TYPE_PARTS
from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.estimate.machine import BackendReport
from crosstune.recipes.preference.losses import make_loss
from crosstune.recipes.preference.open_pairs import open_preferences
from crosstune.recipes.preference.read_pairs import TARGETS
from crosstune.recipes.preference.recipe import PreferenceRecipe


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if a row cannot be read; return the skipped checks."""
    open_preferences(config, paired=make_loss(config).is_paired)
    return [f"whether every answer fits the context: {NOT_TOKENIZED}"]


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    """Return the learning rate: far below that of supervised fine-tuning, which would break the model."""
    if "lr" in config.sources:
        return {}
    is_adapter = TRAIN_TYPE_PARTS[config.train_type][0] in ADAPTER_METHODS
    rate = 1e-5 if is_adapter else 1e-6
    return {
        "lr": Preset(
            value=rate,
            reason=f"usual for preferences with {'adapters' if is_adapter else 'full fine-tuning'}",
        )
    }


SPEC = RecipeSpec(
    open=PreferenceRecipe,
    needs_first_weights=True,
    columns=TARGETS,
    preset_options=("lr",),
    choose_preset=choose_preset,
    check_data=check_data,
)
