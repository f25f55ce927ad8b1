"""Kills, damage, full disks, payloads and signals: the short version. `make faults` runs the long one."""

from __future__ import annotations

import pickle
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from injection import corruption, disks, kills, payloads, signals
from injection.bench import METHODS, Bench, read_bits


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] * (name != "lora")) for name in METHODS]
)
def test_kills_at_the_calls_of_a_save(bench: Bench, method: str) -> None:
    """A sample; each method gets other calls, so that together they meet every part of a resume and a save."""
    first = 5 + 17 * list(METHODS).index(method)
    for number in (first, first + 50):
        assert kills.kill_at_point(bench, method, "save and rotate", number).problems == []


def test_kills_while_a_damaged_checkpoint_is_set_aside(bench: Bench) -> None:
    points = kills.count_points(bench, "lora", "damaged newest")
    (renamed, *_) = [number for number, line in enumerate(points, start=1) if line.endswith(" rename")]
    for number in (renamed, renamed + 1):
        assert kills.kill_at_point(bench, "lora", "damaged newest", number).problems == []


@pytest.mark.parametrize(("method", "seed"), [("full", 2)])
def test_kills_at_random_moments(bench: Bench, method: str, seed: int) -> None:
    trial = kills.kill_at_random(bench, method, seed, longest_s=0.8, num_kills=2)
    assert trial.problems == []


def test_a_lost_checkpoint_would_be_seen(bench: Bench) -> None:
    """The verdict itself: it must fail where something was lost, torn or computed otherwise."""
    from injection.bench import differences, lost_or_torn, weights_file

    folder = bench.copy_halfway("lora", bench.home / "spoilt")
    assert lost_or_torn(folder) == []
    kills.damage(weights_file(folder))
    assert any("torn" in problem for problem in lost_or_torn(folder))
    weights_file(folder).parent.rename(folder / "gone")
    assert lost_or_torn(folder) == ["step 2 was acknowledged and is lost"]
    wanted = bench.reference("lora")
    other = read_bits(bench.home / "straight-lora")
    other["steps"][3]["loss"] += 1e-7
    assert differences(wanted, wanted) == []
    assert differences(other, wanted)


@pytest.fixture(scope="module")
def two_checkpoints(bench: Bench) -> Path:
    folder = bench.home / "two-checkpoints"
    ended = bench.start("lora", folder, keep_last_n=2).wait()
    assert ended.code == 0, ended
    return folder / "checkpoints"


@pytest.mark.parametrize("kind", corruption.KINDS, ids=lambda kind: kind.__name__)
def test_damage_is_seen_and_passed_over(bench: Bench, two_checkpoints: Path, kind: Any) -> None:
    for seed in range(2):
        trial = corruption.corrupt(kind, two_checkpoints, seed=seed, place=bench.home / "damaged")
        assert trial.problems == [], seed


@pytest.fixture(scope="module")
def mounts(bench: Bench) -> None:
    if not disks.can_mount(bench.home):
        pytest.skip("small file systems need root, or a system where users may make namespaces")


@pytest.mark.parametrize("share", [-0.05, 0.7, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_disk_that_fills_while_a_checkpoint_is_written(bench: Bench, mounts: None, share: float) -> None:
    assert disks.fill_disk(bench, "full", share=share, checked=False).problems == []


def test_a_disk_without_room_is_noticed_before_writing(bench: Bench, mounts: None) -> None:
    assert disks.fill_disk(bench, "full", share=0.5, checked=True).problems == []


@pytest.mark.parametrize("limit_bytes", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_limit_on_file_sizes(bench: Bench, limit_bytes: int) -> None:
    assert disks.limit_file_size(bench, "full", limit_bytes=limit_bytes).problems == []


@pytest.mark.parametrize(
    ("how", "on_save_error"),
    [("read-only", "stop"), ("permission lost", "continue"), ("mount vanishes", "stop")],
)
def test_a_folder_that_breaks_while_saving(bench: Bench, mounts: None, how: str, on_save_error: str) -> None:
    assert disks.break_while_saving(bench, "lora", how, on_save_error=on_save_error).problems == []


@pytest.mark.parametrize("name", payloads.PAYLOADS)
def test_a_payload_does_nothing(bench: Bench, name: str) -> None:
    bench.reference("lora")
    assert payloads.try_payload(bench, name, whole=False).problems == []


def test_the_payload_would_have_run(tmp_path: Path) -> None:
    target = payloads.Target(home=tmp_path, run=tmp_path, model=tmp_path, data=tmp_path, outside=tmp_path)
    pickle.loads(target.pickle())
    assert (tmp_path / payloads.CANARY).is_dir()


def test_a_signal_leaves_the_last_step_in_a_checkpoint(bench: Bench) -> None:
    assert signals.stop_by_signal(bench, "lora", signal.SIGTERM, seed=5).problems == []


@pytest.mark.parametrize(
    "trial",
    [
        partial(signals.stop_at_once, method="lora", seed=3),
        pytest.param(partial(signals.stop_by_time, method="lora"), marks=pytest.mark.slow),
        partial(signals.diverge, method="full"),
        partial(signals.bad_example, method="lora", allowed=0),
        partial(signals.bad_example, method="lora", allowed=1),
        partial(signals.second_process, method="lora", resume="auto"),
        partial(signals.second_process, method="lora", overwrite=True),
    ],
    ids=["Ctrl-C twice", "time limit", "diverges", "bad example", "skipped", "two resume", "two overwrite"],
)
def test_an_early_end(bench: Bench, trial: Any) -> None:
    assert trial(bench).problems == []
