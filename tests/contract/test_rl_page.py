"""Run the commands of docs/guide/rl.md as written."""

from __future__ import annotations

import pytest
from pages import Followed, Page, Workshop, put_tiny_model

pytestmark = pytest.mark.slow
PAGE = Page("rl.md")


@pytest.fixture(scope="module")
def followed(shop: Workshop) -> Followed:
    put_tiny_model(shop.home / "cache")
    return Followed(shop, PAGE)


def test_a_model_is_trained_on_its_own_answers(followed: Followed) -> None:
    assert "reward" in followed[1]
    rows = followed.workshop.metrics("brief")
    assert len(rows) == 4
    for row in rows:
        assert 0 < row["reward"] <= 1 and row["rewards/brief/failed"] == 0
        assert row["completions/mean_length"] <= 32
        assert row["sampling/sampling_logp_difference/mean"] < 1e-3
