"""Two processes that start the same run: the short version of `make faults`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from injection import competing, signals
from injection.bench import Bench

from crosstune.files.run_lock import InUse, hold


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("competing"))


@pytest.mark.parametrize(
    ("moment", "resume"),
    [
        pytest.param(moment, resume, marks=[pytest.mark.slow] * (number % 2 == (resume == "none")))
        for number, moment in enumerate(competing.MOMENTS)
        for resume in ("none", "auto")
    ],
)
def test_a_late_start_takes_nothing_from_a_run_that_another_process_finished(
    bench: Bench, moment: str, resume: str
) -> None:
    assert competing.late_start(bench, "lora", moment, resume=resume).problems == []


def test_kills_and_signals_over_two_processes_lose_nothing(bench: Bench) -> None:
    assert competing.kills_and_signals(bench, "lora", 1, num=6).problems == []


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
    ],
)
def test_signals_of_terminals_and_schedulers_stop_with_a_checkpoint(
    bench: Bench, number: signal.Signals
) -> None:
    assert signals.stop_by_signal(bench, "lora", number, 3).problems == []


def test_a_link_to_a_run_is_locked_under_both_names(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs" / "link"
    link.symlink_to(tmp_path / "real")
    with hold(link):
        for other in (link, tmp_path / "real"):
            with pytest.raises(InUse), hold(other):
                pass
        link.rename(tmp_path / "runs" / "link~1")  # as --overwrite does
        link.mkdir()
        with pytest.raises(InUse), hold(link):
            pass
