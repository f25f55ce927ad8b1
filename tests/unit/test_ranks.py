"""The place of a process among those of a run, and the group of a run that has one."""

from __future__ import annotations

from crosstune.core.ranks import Ranks, SingleProcess


def test_only_rank_zero_is_the_first() -> None:
    assert [Ranks(rank=rank, size=3).first for rank in range(3)] == [True, False, False]


def test_a_process_alone_is_the_first_of_one() -> None:
    ranks = SingleProcess().ranks
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.launcher) == (0, 1, 0, 1, None)
    assert ranks.first


def test_a_process_alone_agrees_with_itself() -> None:
    group = SingleProcess()
    assert (group.any(True), group.any(False)) == (True, False)
    assert group.same("a") and group.share("a") == "a"
    assert group.meet() is None
