"""What a run prints on a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest

from crosstune.cli.screen import Screen
from crosstune.core.events import Evaluated, Started, TrainingStarted


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("options", "lines"), [({}, 0), ({"lines": True, "every": 2}, 2)])
def test_lines_above_the_live_bar_are_for_those_who_ask(options: dict[str, Any], lines: int) -> None:
    stream = Terminal()
    screen = Screen(live=True, stream=stream, **options)
    assert screen.live
    screen.on_event(TrainingStarted(num_steps=4, done=0))
    for step in range(1, 5):
        screen.on_step(
            {
                "step": step,
                "loss": 1.0,
                "lr": 0.1,
                "step_s": 0.1,
                "tokens": 9,
                "tokens_per_s": 90.0,
                "memory_bytes": 1,
            }
        )
    screen.close()
    assert stream.getvalue().count("step 2/4") + stream.getvalue().count("step 4/4") == lines


@pytest.mark.parametrize(("metrics", "marks"), [({"loss": 2.0}, 0), ({"loss": 2.0, "exact_match": 0.5}, 2)])
def test_answers_are_marked_only_where_exact_match_is_measured(metrics: dict[str, float], marks: int) -> None:
    samples = [{"prompt": "p", "answer": answer, "reference": "yes"} for answer in ("yes", "sure")]
    stream = io.StringIO()
    screen = Screen(live=False, stream=stream)
    screen.on_event(Evaluated(step=1, when="after", metrics=metrics, samples=samples, seconds=1.0))  # type: ignore[arg-type]
    lines = stream.getvalue().splitlines()
    assert ("  = yes" in lines) + ("  x sure" in lines) == marks
    assert ("  yes" in lines) + ("  sure" in lines) == 2 - marks


def test_notes_about_the_data_are_printed() -> None:
    stream = io.StringIO()
    data = {"dataset": "commands", "train": {"examples": 3}, "notes": ["no --dataset was given"]}
    Screen(live=False, stream=stream).on_event(Started(folder="runs/x", data=data, num_steps=1))
    assert "note     no --dataset was given" in stream.getvalue()
