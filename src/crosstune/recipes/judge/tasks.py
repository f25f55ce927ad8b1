"""Make the task of a judge for an engine."""

from __future__ import annotations

import importlib

from crosstune.core.errors import UserError
from crosstune.core.protocols import Task


def judge_task(head: str, engine: str) -> Task:
    """Return the task of a head; raise a UserError if the engine has none."""
    parts = importlib.import_module(f"crosstune.recipes.judge.{engine}_parts")
    if head == "tokens":
        tokens: Task = parts.ScoreTokens()
        return tokens
    if not hasattr(parts, "ScalarHead"):
        raise UserError(
            "--head scalar works with torch only.",
            why=f"the {engine} engine has no model with a scalar head.",
            do="use --head tokens, or a torch backend",
        )
    scalar: Task = parts.ScalarHead()
    return scalar
