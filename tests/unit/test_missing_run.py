"""A run that does not exist is named as such, with the runs that do."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.results.trained_folder import find_trained


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "second-try"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("runs/dmo", "did you mean runs/demo"),
        ("runs/nothing-like-it", "second-try"),
        ("./runs/dmo", "did you mean runs/demo"),
    ],
)
def test_near_runs_are_listed(target: str, hint: str, runs: Path) -> None:
    with pytest.raises(UserError, match=f"There is no run {target}") as caught:
        find_trained(target)
    assert hint in caught.value.do


def test_a_missing_folder_of_runs_is_not_taken_for_a_hub_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="There is no run runs/nope"):
        find_trained("runs/nope")


@pytest.mark.parametrize("target", ["org/model", "smollm2-135m", "model.gguf", "something"])
def test_names_of_models_are_left_alone(target: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_trained(target).base == target
    monkeypatch.chdir(runs)
    assert find_trained(target).base == target
