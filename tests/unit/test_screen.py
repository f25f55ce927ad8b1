"""What a run prints on a terminal."""

from __future__ import annotations

import builtins
import io
from typing import Any

import pytest

from crosstune.cli.screen import Screen
from crosstune.core.events import TrainingStarted


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


def test_a_notebook_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich finds the notebook by its shell, and shows what is printed as output of the cell."""

    class ZMQInteractiveShell:
        """The class of Jupyter's shell."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    screen = Screen(live=True, stream=Terminal())
    assert screen.console.is_jupyter
    assert not screen.live, "a bar would need ipywidgets"
    assert screen.lines
