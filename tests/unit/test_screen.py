"""The output of a run on a terminal of any width, and without one."""

from __future__ import annotations

import io
import itertools
import re

import pytest

from crosstune.cli.terminal.screen import Screen, open_screen
from crosstune.config.load import load_config
from crosstune.core.events import Evaluated, Started, StepMetrics, TrainingStarted, Warned

WIDTHS = (40, 120)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(request.param))
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return int(request.param)


def step_row(step: int, *, step_s: float = 0.1) -> StepMetrics:
    return {
        "step": step,
        "loss": 1.0,
        "lr": 0.1,
        "step_s": step_s,
        "tokens": 9000,
        "supervised_tokens": 9,
        "grad_norm": 1.0,
        "tokens_per_s": 9000 / step_s,
        "memory_bytes": 3 * 2**30,
    }


@pytest.mark.parametrize("settings", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_turned_off(
    settings: dict[str, str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> str:
        stream = Terminal()
        Screen(live=False, stream=stream).on_event(Warned(message="careful"))
        return stream.getvalue()

    assert "\x1b[33m" in shown()
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert "\x1b[33m" not in shown()
    assert Screen(live=True, stream=Terminal()).live == (settings != {"TERM": "dumb"})


def test_a_log_has_few_lines_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal: the first step, the last one, about twenty in between, and one every minute."""
    clock = [1000.0]
    monkeypatch.setattr("crosstune.cli.terminal.screen.time.monotonic", lambda: clock[0])

    def lines(num_steps: int, step_s: float) -> list[int]:
        stream = io.StringIO()
        screen = Screen(live=True, stream=stream)
        screen.on_event(TrainingStarted(num_steps=num_steps, done=0))
        for step in range(1, num_steps + 1):
            clock[0] += step_s
            screen.on_step(step_row(step, step_s=step_s))
        return [int(found) for found in re.findall(r"^step (\d+)/", stream.getvalue(), re.MULTILINE)]

    for step_s in (0.05, 0.001):
        assert lines(1000, step_s) == [1, *range(50, 1001, 50)]
    slow = lines(100, 30.0)
    assert max(later - earlier for earlier, later in itertools.pairwise(slow)) == 2


def test_speed_and_time_left_are_those_of_recent_steps() -> None:
    stream = io.StringIO()
    screen = Screen(live=False, every=1, stream=stream)
    screen.on_event(TrainingStarted(num_steps=200, done=0))
    for step, step_s in enumerate([100.0, *[1.0] * 30, *[50.0] * 20], start=1):  # it compiles, and slows down
        screen.on_step(step_row(step, step_s=step_s))
    lines = stream.getvalue().splitlines()
    assert "left 2m49s  9,000 tok/s" in lines[30] and "180 tok/s" in lines[-1]


def test_log_to_stdout_writes_to_stdout_unless_that_is_for_json() -> None:
    import sys

    config = load_config(["--log_to", "stdout"])
    assert open_screen(config).output.console.file is sys.stdout
    assert open_screen(config, as_json=True).output.console.file is sys.stderr
    assert not open_screen(config).live
    assert open_screen(load_config([])).output.console.file is sys.stderr


def test_preferences_are_counted_as_pairs_and_shown_with_few_metrics() -> None:
    stream = io.StringIO()
    screen = Screen(live=False, stream=stream)
    screen.on_event(Started(folder="runs/a", data={"train": {"examples": 216}, "pairs": 108}, num_steps=2))
    names = (
        "loss",
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "entropy",
        "kl",
    )
    for step, values in enumerate(((0.69, 0, 0, 0, 0, 6.2, 0), (0.4, 0.5, -0.5, 1, 1, 6.1, 2))):
        metrics = dict(zip(names, values, strict=True))
        screen.on_event(Evaluated(step=step, when="", metrics=metrics, samples=(), seconds=1.0))
    data, *_, first, second = stream.getvalue().splitlines()
    assert "108 pairs (216 answers)" in data
    assert (
        "accuracies" not in first and "entropy" not in first + second
    )  # all rewards are equal: nothing is ranked
    assert "rewards/accuracies 1  " in second.replace("1.000", "1") and "rewards/margins 1" in second
