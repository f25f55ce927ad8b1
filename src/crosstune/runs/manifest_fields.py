"""Write the fields of a checkpoint's manifest, except for the description of its files."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from crosstune.config.plan import Plan
from crosstune.core.protocols import Recipe
from crosstune.runs.same_training import base_fields, quantization_name


def manifest_fields(
    step: int,
    *,
    plan: Plan,
    recipe: Recipe,
    described: Mapping[str, Any],
    next_lr: float | None,
    progress: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the manifest's fields at a step. `described` is the description in plan.json; `next_lr` is None after
    the last step."""
    config = plan.config
    return {
        "step": step,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "engine": plan.engine,
        "backend": plan.backend.name,
        "precision": plan.precision,
        "quantization": quantization_name(plan),
        **base_fields(plan),
        "method": plan.method,
        "recipe": config.recipe,
        "identity": described["identity"],
        "schedule": {
            "name": config.lr_scheduler,
            "step": step,
            "num_steps": recipe.num_steps(),
            "next_lr": next_lr,
        },
        "data": dict(recipe.position(step)),
        "progress": dict(progress),
        "asked": described["asked"],
        "options": described["options"],
        "versions": described["machine"].get("versions", {}),
        "resumed_from": described["resumed_from"],
    }
