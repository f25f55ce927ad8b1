"""What the likeliest tokens along a reference tell of the answer that greedy decoding gives."""

from __future__ import annotations

import numpy as np
import pytest

from crosstune.core.protocols import UNSURE
from crosstune.data.foreseen import Foreseen, foresee, foresee_answers, has_left
from crosstune.data.token_batch import Example

STOP = {9}


def known(*tokens: int, whole: bool = False) -> Foreseen:
    return Foreseen(tokens=list(tokens), is_whole=whole)


@pytest.mark.parametrize(
    ("likeliest", "expected"),
    [
        ([4, 5, 9, 7], known(4, 5, whole=True)),  # what follows the end is never written
        ([4, 5, 6, 7], known(4, 5, 6)),
        ([4, 8, 9, 7], known(4, 8)),  # the 9 follows a 5 that is not written
        ([9, 5, 9, 7], known(whole=True)),
        ([4, UNSURE, 9, 7], known(4)),
        ([UNSURE, 5, 9, 7], known()),
    ],
)
def test_an_answer_is_known_up_to_its_first_other_token(likeliest: list[int], expected: Foreseen) -> None:
    assert foresee([4, 5, 9, 7], likeliest, stop_ids=STOP, limit=64) == expected


def test_an_answer_ends_at_the_limit_and_not_at_the_end_of_a_cut_reference() -> None:
    assert foresee([4, 5, 6, 9], [4, 5, 6, 9], stop_ids=STOP, limit=2) == known(4, 5, whole=True)
    assert foresee([4, 5, 6], [4, 5, 6], stop_ids=STOP, limit=64) == known(4, 5, 6)


def test_the_last_answer_of_each_example_is_found_by_its_prompt() -> None:
    first = example([1, 2, 4, 9], supervised=[2, 3])
    turns = example([1, 2, 4, 9, 3, 5, 9, 0], supervised=[2, 3, 5, 6])
    without = example([1, 2], supervised=[])
    predicted = np.array([4, 9, 7, 7, 5, 9])
    found = foresee_answers([first, without, turns], predicted, stop_ids=STOP, limit=64)
    assert found == {(1, 2): known(4, whole=True), (1, 2, 4, 9, 3): known(5, whole=True)}


def test_predictions_for_other_examples_are_refused() -> None:
    with pytest.raises(AssertionError):
        foresee_answers([example([1, 2, 4], supervised=[2])], np.array([4, 9]), stop_ids=STOP, limit=64)


@pytest.mark.parametrize(
    ("beginning", "left"),
    [
        ("", False),
        ("do", False),
        ("do n", False),  # a tokenizer may join them to don't
        ("don't", False),
        ("don't\n", False),
        ("do\N{REPLACEMENT CHARACTER}", False),
        ("di", True),
        ("don't!", True),
        ("\N{REPLACEMENT CHARACTER}d", True),
    ],
)
def test_only_an_answer_that_can_no_longer_match_has_left(beginning: str, left: bool) -> None:
    assert has_left(beginning, "don't") is left


def example(tokens: list[int], *, supervised: list[int]) -> Example:
    marks = np.zeros(len(tokens), dtype=np.bool_)
    marks[supervised] = True
    return Example(tokens=np.array(tokens, dtype=np.int32), supervised=marks, index=0)
