"""The loop and its data: batches are prepared in a thread, and no step is lost if a recipe fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.config.load import make_config
from crosstune.recipes.sft import SftRecipe
from crosstune.runs.pipeline import train


@pytest.fixture
def options(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"a {n}", "completion": f"b {n}"}) + "\n" for n in range(8))
    )
    return (
        {"model_name": str(tiny_model), "dataset": str(data), "backend": "cpu", "precision": "fp32"}
        | {"output_dir": str(tmp_path / "runs"), "name": "run", "max_steps": 5, "num_epochs": 9}
        | {"batch_size": 2, "skip_eval": True}
    )


def saved_steps(tmp_path: Path) -> list[int]:
    return [step for step, _ in checkpoint_folders(tmp_path / "runs" / "run" / "checkpoints")]


@pytest.mark.parametrize("error", [ZeroDivisionError, StopIteration])
def test_an_error_in_the_data_of_a_step_loses_no_step(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[BaseException]
) -> None:
    window = SftRecipe.micro_batches

    def failing(recipe: SftRecipe, step: int) -> Any:
        if step == 3:
            raise error
        return window(recipe, step)

    monkeypatch.setattr(SftRecipe, "micro_batches", failing)
    with pytest.raises(error):
        train(make_config(**options))
    assert saved_steps(tmp_path) == [3]


@pytest.mark.parametrize(("error", "saved"), [(KeyboardInterrupt, []), (ZeroDivisionError, [2])])
def test_an_error_in_an_evaluation_loses_no_step_and_ctrl_c_leaves_at_once(
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: type[BaseException],
    saved: list[int],
) -> None:
    evaluate, calls = SftRecipe.evaluate, list[int]()

    def failing(recipe: SftRecipe, session: Any, *, observer: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the first one is before the training
            raise error
        return evaluate(recipe, session, observer=observer)

    monkeypatch.setattr(SftRecipe, "evaluate", failing)
    asked = options | {"skip_eval": False, "eval_steps": 2, "num_samples": 0, "max_new_tokens": 1}
    with pytest.raises(error):
        train(make_config(**asked))
    assert saved_steps(tmp_path) == saved
