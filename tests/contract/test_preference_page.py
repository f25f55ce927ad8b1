"""Run the commands of docs/guide/preference.md as written."""

from __future__ import annotations

import json

import pytest
from pages import Followed, Page, Workshop, put_tiny_model

pytestmark = pytest.mark.slow
PAGE = Page("preference.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    put_tiny_model(shop.home / "cache")
    rows = [
        {
            "prompt": f"Is {number} even?",
            "chosen": "Yes." if number % 2 == 0 else "No.",
            "rejected": "I do not know.",
        }
        for number in range(24)
    ]
    (shop.home / "prompts.txt").write_text("Why is the sky blue?\nName a color.\n")
    (shop.home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Followed(shop, PAGE)


def test_a_model_is_trained_on_pairs(followed: Followed) -> None:
    assert "rewards/accuracies" in followed[0]
    lines = (followed.workshop.home / "runs/liked/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3) and losses[-1] < losses[0]


def test_pairs_are_made_and_checked(followed: Followed) -> None:
    assert "2 pairs from 2 prompts" in followed[2]
    assert "100.0%" in followed[3] and "2 pairs were made with this judge" in followed[3]


def test_the_data_is_shown_before_the_training(followed: Followed) -> None:
    assert "24 read = 22 to train on + 2 held out" in followed[1] and "[[Yes.<|im_end|>]]" in followed[1]
