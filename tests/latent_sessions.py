"""Open small latent-diffusion sessions for tests, as `train` opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.config.load import make_config
from crosstune.planner.gather import make_plan
from crosstune.recipes.latent_diffusion import open_recipe
from crosstune.recipes.latent_diffusion.build import BuildRequest, build
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, open_pairs
from crosstune.recipes.latent_diffusion.recipe import LatentDiffusionRecipe
from crosstune.recipes.latent_diffusion.texts import WriteOptions
from crosstune.runs.open_parts import open_session


def grammar_pairs(folder: Path, *, count: int = 300) -> PairFolder:
    options = WriteOptions(max_tokens=12)
    build(BuildRequest(source="grammar", out=folder, max_texts=count, options=options))
    return open_pairs(folder)


def opened(pairs: PairFolder, **options: Any) -> tuple[LatentDiffusionRecipe, Any]:
    """Return a recipe and its session."""
    plan = make_plan(
        make_config(
            **{
                "recipe": "latent_diffusion",
                "dataset": str(pairs.folder),
                "backend": "cpu",
                "precision": "fp32",
                "hidden_size": 32,
                "n_blocks": 2,
                "batch_size": 16,
                "max_steps": 20,
            }
            | options
        )
    )
    recipe = open_recipe(plan.config, model_folder=None, observer=None)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return recipe, open_session(plan, None, task=recipe.task("torch"))


def unsettle(model: nn.Module) -> None:
    """Move all weights away from the start, where zero gates hide half of the model."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
