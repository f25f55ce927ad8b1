"""Rewards that cannot work are rejected by a plan, before a model is loaded and without running a user's code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.recipes.rl.rewards.open_rewards import check_columns, check_files, reward_specs


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quality.py"
    path.write_text(
        "raise SystemExit('not to be run')\nfrom os import path as where\ndef near(): ...\nfar = near\n"
    )
    return path


def make(reward: str, **more: Any) -> Any:
    return make_config(recipe="rl", reward=reward, **more)


def test_names_that_a_file_has(file: Path) -> None:
    check_files(make(f"{file}:near,{file}:far,{file}:where,exact:answer"))
    with pytest.raises(UserError, match="cannot be used") as error:
        check_files(make(f"{file}:nearest"))
    assert "has no function nearest" in str(error.value.why)
    file.write_text("from elsewhere import *")
    check_files(make(f"{file}:nearest"))
    file.write_text("def near(:")
    with pytest.raises(UserError) as error:
        check_files(make(f"{file}:near"))
    assert "is not Python" in str(error.value.why)


def test_files_that_are_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file .*none\.py"):
        check_files(make(f"{tmp_path}/none.py:near"))
    with pytest.raises(UserError, match=r"none\.json"):
        check_files(make(f"json:{tmp_path}/none.json"))
    with pytest.raises(UserError, match="needs a rubric"):
        check_files(make("server:http://127.0.0.1:1/v1"))


def test_weights_and_columns() -> None:
    with pytest.raises(UserError, match="does not match"):
        reward_specs(make("exact:answer,json", reward_weights="1"))
    with pytest.raises(UserError, match="No reward has a weight"):
        reward_specs(make("exact:answer*0"))
    with pytest.raises(UserError, match="the column result, which no row has") as error:
        check_columns(make("exact:answer,number:result"), {"answer", "level"})
    assert error.value.why == "the rows have answer, level."
    check_columns(make("exact:answer"), {"answer"})
