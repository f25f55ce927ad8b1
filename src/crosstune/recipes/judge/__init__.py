"""The `judge` recipe: train models that score an answer, or choose the better of two answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec
from crosstune.config.schema import Config
from crosstune.recipes.judge.open_splits import open_judge_data
from crosstune.recipes.judge.presets import OPTIONS, choose_preset
from crosstune.recipes.judge.read_items import TARGETS
from crosstune.recipes.judge.recipe import open_recipe
from crosstune.recipes.judge.verdicts import choose_format


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if a row cannot be read or leaks into the held-out data; return the skipped checks."""
    data = open_judge_data(config)
    choose_format(config.verdict, scale=data.scale, items=[*data.train, *data.val])
    return [f"whether every item fits the context: {NOT_TOKENIZED}"]


def next_commands(run: str, options: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and commands for the uses of a finished run."""
    return [
        ("use it", f"crosstune judge predict {run} --input answers.jsonl --output verdicts.jsonl"),
        ("test it", f"crosstune judge eval {run} --dataset labeled.jsonl"),
    ]


SPEC = RecipeSpec(
    open=open_recipe,
    data_options=("dataset", "eval_dataset", "test_dataset"),
    columns=TARGETS,
    preset_options=tuple(OPTIONS),
    choose_preset=choose_preset,
    check_data=check_data,
    next_commands=next_commands,
)
