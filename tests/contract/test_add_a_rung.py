"""docs/add-a-rung.md, followed as it is written: a rung that helps is kept, one that slows or breaks its promise is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from pages import Followed, Page, Workshop, check_house_style, open_workshop

pytestmark = pytest.mark.slow  # about twenty short trainings

PAGE = Page("add-a-rung.md")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    with open_workshop(tmp_path_factory.mktemp("rung"), PAGE) as workshop:
        yield workshop


def test_what_helps_is_kept_and_the_rest_is_rolled_back(shop: Workshop) -> None:
    out = Followed(shop, PAGE)[0]
    found = {step["rung"]: step for step in shop.json("runs/tried/ladder.json")["rungs"]}
    assert found["one_batch"]["outcome"] == "kept", out
    assert found["single_rows"]["outcome"] == "rolled back" and "speed x 0." in found["single_rows"]["why"]
    assert (
        found["other_rate"]["outcome"] == "rolled back" and "the loss differs" in found["other_rate"]["why"]
    )
    options = yaml.safe_load((shop.home / "runs/tried/train.yaml").read_text(encoding="utf-8"))
    assert (options["batch_size"], options["gradient_accumulation_steps"], options.get("lr")) == (16, 1, None)
    criteria = {c["what"].split()[0]: c["met"] for c in shop.json("runs/tried/ladder.json")["criteria"]}
    assert criteria["speed"] == "yes" and criteria["checkpoints"] == "yes" and criteria["no"] == "cannot say"

    again = shop.run(PAGE.commands()[0].removeprefix("crosstune "))  # every trial is read, none is run
    assert "result   1 kept" in again

    refused = shop.run(PAGE.commands()[0].removeprefix("crosstune ").replace("12", "13"), code=2)
    assert "another request" in refused and "steps" in refused


def test_the_files_pass_the_checks_of_the_house(shop: Workshop) -> None:
    check_house_style(shop, PAGE)
