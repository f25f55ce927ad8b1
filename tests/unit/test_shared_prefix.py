"""Rows that begin alike as one row: the tokens, what each of them sees, and when it is worth it."""

from __future__ import annotations

import numpy as np
import pytest

from crosstune.data.batches import pack_rows, pad_rows
from crosstune.data.shared_prefix import MOST_TOKENS, share_prefix
from crosstune.data.token_batch import IGNORED, Example


def example(*tokens: int, supervised: int) -> Example:
    """An example whose last `supervised` tokens have a loss."""
    marks = np.arange(len(tokens)) >= len(tokens) - supervised
    return Example(tokens=np.array(tokens, dtype=np.int32), supervised=marks, index=0)


BEGIN = (1, 2, 3, 4, 5)
EXAMPLES = [
    example(*BEGIN, 6, 7, 8, supervised=2),
    example(*BEGIN, 9, 10, supervised=1),
    example(*BEGIN, 6, 12, 13, supervised=1),
]


def test_common_tokens_stand_once_and_each_token_sees_its_own_row() -> None:
    row = share_prefix(pad_rows(EXAMPLES, pad_id=0))
    assert row is not None
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 6, 12, 13]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 5, 6, 7]
    no = IGNORED
    assert row.targets.tolist() == [no, no, no, no, no, 7, 8, no, 10, no, no, 13, no]
    for place in range(13):
        seen = [int(row.tokens[other]) for other in np.flatnonzero(row.seen[place])]
        owner = EXAMPLES[0 if place < 8 else 1 if place < 10 else 2]
        assert seen == owner.tokens[: row.positions[place] + 1].tolist()


def test_a_token_whose_next_one_is_learned_is_not_common() -> None:
    """It has a loss in each row, so it must be computed in each."""
    rows = [example(*BEGIN, 6, supervised=1), example(*BEGIN, 7, supervised=1)]
    row = share_prefix(pad_rows(rows, pad_id=0))
    assert row is not None
    assert row.tokens.tolist() == [1, 2, 3, 4, 5, 6, 5, 7]
    assert (row.targets != IGNORED).sum() == 2


def test_a_row_within_another_keeps_a_token_of_its_own() -> None:
    rows = [example(*BEGIN, 6, supervised=1), example(*BEGIN, 6, supervised=1)]
    row = share_prefix(pad_rows(rows, pad_id=0))
    assert row is not None
    assert (row.targets != IGNORED).sum() == 2


@pytest.mark.parametrize(
    "rows",
    [
        EXAMPLES[:1],
        [example(1, 2, 3, supervised=1), example(4, 2, 3, supervised=1)],
        [example(*range(20), supervised=19), example(*range(20), supervised=19)],
        [example(1, *range(2, 30), supervised=1), example(1, *range(30, 58), supervised=1)],
        [example(*BEGIN, 6, supervised=0), example(*BEGIN, 7, supervised=0)],
        [example(*range(400), 5, supervised=1), example(*range(MOST_TOKENS), supervised=1)],
    ],
    ids=["one row", "no common token", "all learned", "few common tokens", "no loss", "too long"],
)
def test_other_rows_stay_as_they_are(rows: list[Example]) -> None:
    assert share_prefix(pad_rows(rows, pad_id=0)) is None


def test_packed_rows_stay_as_they_are() -> None:
    assert share_prefix(pack_rows([EXAMPLES, EXAMPLES], pad_id=0)) is None
