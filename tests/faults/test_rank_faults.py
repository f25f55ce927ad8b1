"""Ranks that are killed and stopped, with the real launcher: the short version of `make faults`."""

from __future__ import annotations

from pathlib import Path

import pytest
import warm
from injection import ranks
from injection.bench import Bench

from crosstune.files.json_files import read_jsonl


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("ranks"))


KILL_IN_PARTS = """
import sys
from pathlib import Path
from injection import rank_saves
from injection.bench import Bench

bench, rank = Bench(Path(sys.argv[1])), int(sys.argv[2])
points = rank_saves.points_of(bench, "full", "save and rotate", rank)
number = points.index("symlink") + 1 if rank == 0 else rank_saves.distinct(points)[3]
assert points[number - 1] == ("symlink", "write")[rank]
problems = rank_saves.kill_at_point(bench, "full", "save and rotate", rank, number).problems
assert problems == [], problems
"""
# A process that has computed already has threads, which its forks lack: gloo crashes in some of them.


@pytest.mark.slow
def test_a_run_recovers_from_a_killed_rank_bit_for_bit(bench: Bench, tmp_path: Path) -> None:
    wanted = ranks.straight(bench, 2, "lora")
    run = ranks.launch(bench, tmp_path / "killed", size=2, max_restarts=1, pause_s=0.5)
    started = run.await_ranks(0)
    run.wait_until(lambda: run.steps() >= ranks.SAVE_STEPS + 1)
    started[1].kill()
    assert run.wait() == 0, run.said.read_text()
    assert ranks.differences(ranks.read_bits(run.folder), wanted) == []
    said = run.said.read_text()
    assert "was killed by SIGKILL" in said and "(restart 1 of 1)" in said
    assert [event["kind"] for event in read_jsonl(run.folder / "events.jsonl")].count("resumed") == 1


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_in_parts_survives_a_kill(bench: Bench, rank: int) -> None:
    """The first rank dies between the new folder and `latest`, the second while it writes its part."""
    code, said = warm.start(KILL_IN_PARTS, str(bench.home), str(rank)).end()
    assert code == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_ends_the_job_within_the_limit(bench: Bench, rank: int) -> None:
    assert ranks.stop_rank(bench, size=2, rank=rank, limit_s=15.0).problems == []
