"""The declarations of options: conditions, and effects on a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest

from crosstune.config.load import load_config, make_config
from crosstune.config.schema import Config, option_list
from crosstune.core.errors import UserError
from crosstune.runs.resume import for_record
from crosstune.runs.resume_identity import Difference, changed_options, check_same

SOURCE = Path(__file__).parents[2] / "src" / "crosstune"


def test_every_option_is_read_by_some_code() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "options" and path.name != "conditions.py"
    )
    names = [option.name for option in option_list()]
    reads = r'\.{0}\b|\["{0}"\]|data_options=.*"{0}"'
    unread = {name for name in (*names, "no_such_option") if not re.search(reads.format(name), code)}
    assert unread == {"no_such_option"}


def change(was: dict[str, Any], **now: Any) -> list[str]:
    manifest = make_manifest(options=Config().options() | was)
    return [found.what for found in changed_options(manifest, make_config(**now))]


def test_a_change_is_reported_unless_it_leaves_the_training_as_it_is() -> None:
    assert change({}, lr=1e-3, save_steps=7, time_limit="3h", name="x") == ["lr"]
    assert change({}, backend="cpu", dataset="other.jsonl") == ["dataset", "backend"]


def test_what_was_asked_of_one_start_is_not_kept() -> None:
    asked = make_config(name="x", resume="auto", overwrite=True, time_limit="1h", allow_mismatch="data")
    assert set(for_record(asked).sources) == {"name"}


@pytest.mark.parametrize("option", ["seed", "skip_eval", "eval_samples", "truncation"])
def test_options_that_divide_the_data_are_named(option: str) -> None:
    other = {"seed": 1, "skip_eval": True, "eval_samples": 3, "truncation": "cut"}[option]
    manifest, config = make_manifest(options=Config().options()), make_config(**{option: other}, lr=1.0)
    with pytest.raises(UserError) as error:
        check_same([Difference("data", "training data", "a", "b")], manifest, config)
    assert f"training data: a in the checkpoint, b now; possible cause: {option}: " in error.value.why
    assert "lr" not in error.value.why


def test_an_option_without_effect_in_the_recipe_is_not_blamed() -> None:
    manifest, config = make_manifest(options=Config().options()), make_config(verdict="score", group_by="x")
    with pytest.raises(UserError) as error:
        check_same([Difference("data", "training data", "a", "b")], manifest, config)
    assert error.value.why is not None and error.value.why.endswith(
        "possible cause: its files or the tokenizer"
    )


def test_the_former_names_of_options_are_read(tmp_path: Path) -> None:
    """Those of older run folders and of the guides."""
    (tmp_path / "config.yaml").write_text("with_stack: true\ngroup: ours\nmax_grad_norm: 0.5\n")
    config = load_config(["--wait_steps", "3", "--repeat=2"], file=tmp_path / "config.yaml", environment={})
    assert (config.profile_with_stack, config.tracker_group, config.grad_norm) == (True, "ours", 0.5)
    assert (config.profile_wait_steps, config.profile_repeat) == (3, 2)
