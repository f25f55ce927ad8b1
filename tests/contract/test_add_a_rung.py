"""Follow docs/internals/add-a-rung.md: a rung that helps is kept; a rung that is slower or breaks its promise is not."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from pages import Page, Workshop

pytestmark = pytest.mark.slow  # about twenty short trainings

PAGE = Page("add-a-rung.md")


WORDS = PAGE.commands()[0].removeprefix("crosstune ")


EXPECTED = {"one_batch": "kept", "single_rows": "rolled back", "other_rate": "rolled back"}


def outcomes(climbed: Mapping[str, Any]) -> dict[str, str]:
    return {step["rung"]: step["outcome"] for step in climbed["rungs"]}


def climb(shop: Workshop) -> tuple[str, dict[str, Any]]:
    """Follow the page; again, if the ladder itself says that something else has disturbed its trials."""
    for _ in range(3):
        shutil.rmtree(shop.home / "runs" / "tried", ignore_errors=True)
        out, climbed = shop.run(WORDS), shop.json("runs/tried/ladder.json")
        if outcomes(climbed) == EXPECTED or "something else uses this machine" not in out:
            break
    return out, climbed


def test_what_helps_is_kept_and_the_rest_is_rolled_back(shop: Workshop) -> None:
    out, climbed = climb(shop)
    assert outcomes(climbed) == EXPECTED, out
    why = {step["rung"]: step["why"] for step in climbed["rungs"]}
    assert "speed x 0." in why["single_rows"] and "the loss differs" in why["other_rate"]
    options = yaml.safe_load((shop.home / "runs/tried/train.yaml").read_text(encoding="utf-8"))
    assert (options["batch_size"], options["gradient_accumulation_steps"], options.get("lr")) == (16, 1, None)
    criteria = {c["what"].split()[0]: c["met"] for c in climbed["criteria"]}
    assert criteria["speed"] in ("yes", "cannot say")  # the latter on a busy machine
    assert criteria["checkpoints"] == "yes" and criteria["all"] == "cannot say"

    again = shop.run(WORDS)  # every trial is read, none is run
    assert "result   1 kept" in again

    refused = shop.run(WORDS.replace("12", "13"), code=2)
    assert "different request" in refused and "steps" in refused
