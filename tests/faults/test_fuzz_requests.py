"""Requests with bad values; `make fuzz` runs tens of thousands."""

from __future__ import annotations

from pathlib import Path

import pytest
from injection.requests import answer, make_request, problems

CASES = 20


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 40))])
def test_each_ends_with_a_plan_or_a_refusal_that_names_what_is_wrong(first: int, tmp_path: Path) -> None:
    found = {}
    for seed in range(first, first + CASES):
        request = make_request(seed)
        if wrong := problems(request, answer(request, tmp_path)):
            found[seed] = wrong
    assert found == {}, "python benchmarks/fuzz_requests.py --replay SEED shows one"
