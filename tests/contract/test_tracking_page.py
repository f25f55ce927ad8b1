"""Follow docs/guide/tracking.md as written: its commands in order, and its tracker in a copy of the package."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator

import pytest
from pages import Page, Workshop
from support import chat

from crosstune.models.tiny import tiny_model

PAGE = Page("tracking.md")
pytestmark = pytest.mark.slow  # a copy of the package and a process that loads torch


@pytest.fixture(scope="module", autouse=True)
def files(shop: Workshop) -> Iterator[None]:
    tiny_model(shop.home / "my-model")
    rows = [json.dumps(chat(f"say {n}", f"it is {n}")) + "\n" for n in range(30)]
    (shop.home / "chats.jsonl").write_text("".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")  # as its third line does
        yield


def commands() -> list[str]:
    lines = PAGE.commands()
    assert lines[0].startswith("pip install") and lines[2] == "export WANDB_MODE=offline"
    return [line.removeprefix("crosstune ") for line in lines if line.startswith("crosstune ")]


def test_a_run_is_followed_and_resumed(shop: Workshop) -> None:
    for name in ("tensorboard", "wandb"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install 'crosstune[track]'")
    first, second, _ = commands()
    out = shop.run(f"{first} --backend cpu --precision fp32")
    assert "tracking tensorboard: runs/seen/tensorboard" in out and "tensorboard --logdir runs" in out
    out = shop.run(second)
    assert "tracking wandb: offline files in runs/seen/wandb/offline-run-" in out
    assert len(list((shop.home / "runs/seen/tensorboard").iterdir())) == 2
    assert shop.json("runs/seen/tracking/wandb.json")["steps"] == {"train": 8, "eval": 8}


def test_the_tracker_of_the_page_takes_every_value(shop: Workshop) -> None:
    out = shop.run(f"{commands()[-1]} --backend cpu --precision fp32")
    assert "tracking table: runs/listed/table.tsv" in out
    lines = (shop.home / "runs/listed/table.tsv").read_text().splitlines()
    losses = [float(line.split("\t")[2]) for line in lines if "\ttrain/loss\t" in line]
    assert losses == [row["loss"] for row in shop.metrics("listed")]


def test_a_tracker_that_is_not_installed_is_named(shop: Workshop) -> None:
    file = shop.home / "src/crosstune/tracking/trackers/lost.py"
    file.write_text((file.parent / "table.py").read_text().replace('"csv"', '"no_such_package_xyz"'))
    for command in ("plan", "train"):
        out = shop.run(f"{command} --backend cpu --model_name ./my-model --log_to lost", code=2)
        assert "pip install no_such_package_xyz" in out
    file.unlink()
