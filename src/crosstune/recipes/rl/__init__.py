"""The `rl` recipe: reinforcement learning from rewards of the model's own answers (GRPO and its family)."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.estimate.machine import BackendReport
from crosstune.recipes.rl.read_prompts import TARGETS, columns_of, read_prompts
from crosstune.recipes.rl.recipe import RlRecipe
from crosstune.recipes.rl.rewards.open_rewards import check_columns, check_files
from crosstune.recipes.sft import low_rate

LONGEST_ANSWER = 512


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if a row cannot be read, or lacks a column of a reward; return the skipped checks."""
    check_columns(config, columns_of(read_prompts(config).train))
    return [f"whether every prompt leaves room for an answer: {NOT_TOKENIZED}"]


def choose_preset(config: Config, report: BackendReport) -> dict[str, Preset]:
    """Return the learning rate, far below that of supervised fine-tuning, and the length of answers."""
    found = low_rate(config, what="rewards")
    if "max_new_tokens" not in config.sources:
        found["max_new_tokens"] = Preset(value=LONGEST_ANSWER, reason="usual for answers with rewards")
    return found


SPEC = RecipeSpec(
    open=RlRecipe,
    opens_judges=True,
    needs_first_weights=True,
    columns=TARGETS,
    preset_options=("lr", "max_new_tokens"),
    choose_preset=choose_preset,
    check_data=check_data,
    check_files=check_files,
)
