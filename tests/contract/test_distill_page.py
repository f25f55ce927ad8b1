"""Run the commands of docs/guide/distill.md as written."""

from __future__ import annotations

import json

import pytest
from pages import Followed, Page, Workshop, put_tiny_model

from crosstune.models.tiny import tiny_model

pytestmark = pytest.mark.slow
PAGE = Page("distill.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    rows = [
        {"prompt": f"Is {number} even?", "completion": "Yes." if number % 2 == 0 else "No, it is odd."}
        for number in range(24)
    ]
    put_tiny_model(shop.home / "cache")
    tiny_model(shop.home / "teacher", hidden=96)
    (shop.home / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Followed(shop, PAGE)


def test_every_command_trains(followed: Followed) -> None:
    for number, name in enumerate(("small", "stored", "own")):
        assert "finished 4 steps" in followed[number]
        lines = (followed.workshop.home / "runs" / name / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 4 and all(row["kl"] > 0 for row in rows)
        assert ("on_policy" in rows[0]) == (name == "own")
    assert (followed.workshop.home / "runs" / "stored" / "reference.safetensors").is_file()
