"""Run the commands of docs/guide/judge.md as written, in order."""

from __future__ import annotations

import json

import pytest
from pages import Followed, Page, Workshop

from crosstune.models.tiny import tiny_model

pytestmark = pytest.mark.slow  # six commands that each load torch


PAGE = Page("judge.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    tiny_model(shop.home / "my-model")
    rows = "".join(f"word {number // 2},answer {number},{1 + number % 5}\n" for number in range(60))
    (shop.home / "ratings.csv").write_text(f"quelle,answer,note\n{rows}")
    row = '{"id": "x", "task": "say hi", "answer": "hi", "reference": "hello"}\n'
    (shop.home / "answers.jsonl").write_text(row)
    return Followed(shop, PAGE)


def test_a_judge_is_trained_and_tested(followed: Followed) -> None:
    assert "Pearson" in followed[0] and "untrained model" in followed[0]
    assert "written  runs/grader/test_predictions.json" in followed[0]
    again = followed[1]
    assert "24 items in 6 groups" in again and "untrained model" not in again
    rows = json.loads((followed.workshop.home / "runs/grader/test_predictions.json").read_text())
    assert len(rows) == 24


def test_data_is_shown_and_split(followed: Followed) -> None:
    assert "judged by winner" in followed[2] and "Answer B:" in followed[2]
    assert "judge_test.json (6 items in 3 groups)" in followed[3]


def test_verdicts_and_predictions(followed: Followed) -> None:
    assert "(1 verdicts)" in followed[4]
    row = json.loads((followed.workshop.home / "verdicts.jsonl").read_text())
    assert row["id"] == "x" and 0 <= row["predicted"] <= 10 and 0 < row["confidence"] <= 1
    assert "24 items in 6 groups" in followed[5]
