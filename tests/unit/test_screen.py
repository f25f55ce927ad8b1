"""The output of a run on a terminal of any width, and without one."""

from __future__ import annotations

import io
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from crosstune.cli.terminal.event_lines import ending_lines
from crosstune.cli.terminal.output import Output, print_error
from crosstune.cli.terminal.screen import MIN_BAR, BarLine, Screen, open_screen
from crosstune.cli.terminal.streams import fold
from crosstune.cli.terminal.units import figure
from crosstune.config.load import load_config
from crosstune.core.errors import UserError
from crosstune.core.events import (
    Adjusted,
    Evaluated,
    Evaluating,
    EvaluationStarted,
    Event,
    ModelProgress,
    ResultSaved,
    SampleRow,
    Started,
    StepMetrics,
    TrainingEnded,
    TrainingStarted,
    Warned,
)

WIDTHS = (40, 120)
LONG_PATH = "/home/someone/experiments/" + "a-run-with-a-long-name/" * 4
EVENTS: list[Event] = [
    Adjusted(
        option="precision",
        asked="bf16",
        used="fp32",
        reason="",
        adjustment_kind="change",
        sentence="precision: fp32 instead of bf16, because bf16 matrix products are much slower on this processor",
    ),
    Started(
        folder=LONG_PATH,
        data={
            "dataset": "chats.jsonl",
            "train": {"examples": 12345, "tokens": 9, "supervised_tokens": 5, "longest": 3},
        },
        num_steps=4,
    ),
    ModelProgress(
        stage="downloading", done=2**20, total=2**30, model="organisation/a-model-with-a-long-name"
    ),
    ModelProgress(
        stage="downloading", done=2**30, total=2**30, model="organisation/a-model-with-a-long-name"
    ),
    Warned(message="a [bold]sentence[/bold] in brackets is not markup, and it is long enough to be folded"),
    EvaluationStarted(step=0, when="before"),
    Evaluating(done=3, total=12345),
    Evaluated(
        step=0,
        when="before",
        metrics={"loss": 2.34567, "exact_match": 0.25},
        samples=[SampleRow(prompt="Turn off the attic fan. " * 9, answer="off " * 50, reference="off")],
        seconds=3.2,
    ),
    TrainingStarted(num_steps=1000, done=0),
]


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


def rows_of(printed: str) -> list[str]:
    """Return every row that was ever on the screen."""
    return re.split(r"[\r\n]", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", printed))


def check_rows(rows: list[str], *, width: int, source: str) -> None:
    words = set(source.split())
    for row in rows:
        assert cell_len(row) <= width, f"wider than the screen: {row!r}"
        broken = [word for word in row.split() if word not in words | _parts_of_long(words, word, width)]
        assert not broken, f"not words of the text: {broken}"


def _parts_of_long(words: set[str], part: str, width: int) -> set[str]:
    """Only a word that is wider than the screen may be broken."""
    return {part for word in words if part in word and cell_len(word) > width}


def test_no_row_is_wider_than_the_screen_and_no_word_is_broken(width: int) -> None:
    def show(stream: io.StringIO, *, live: bool) -> str:
        screen = Screen(live=live, every=1, stream=stream)
        for event in EVENTS:
            screen.on_event(event)
        screen.on_step(step_row(1))
        screen.on_event(ResultSaved(path=LONG_PATH + "adapter", step=1))
        screen.close()
        return stream.getvalue()

    whole = show(io.StringIO(), live=True)
    rows = rows_of(show(Terminal(), live=False))
    check_rows(rows, width=width, source=whole)
    assert "".join("".join(rows).split()) == "".join(whole.split())
    for row in rows_of(show(Terminal(), live=True)):
        assert cell_len(row) <= width


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


def test_errors_and_the_ending_fold_and_have_colours(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    error = UserError("A long sentence " * 8, why="because of many words " * 8, do="do something else " * 8)
    print_error(error.lines())
    assert "\x1b[1;31m" in stream.getvalue()
    check_rows(rows_of(stream.getvalue()), width=width, source="crosstune: " + "\n".join(error.lines()))

    summary = {
        "status": "finished",
        "steps": 1000,
        "tokens": 123456,
        "tokens_per_s": 1234.567,
        "seconds": 90.0,
        "peak_memory_bytes": 2**31,
        "eval_before": {"loss": 2.34567},
        "eval_after": {"loss": 1.23456},
        "result": str(Path.cwd() / "runs/demo/adapter"),
        "generates": True,
        "checkpoint": "x",
    }
    lines = [text for text, _ in ending_lines(summary, Path("runs/demo"), Path("runs/demo/report.html"))]
    for expected in (
        "1,230 tok/s",
        "loss 2.35 before training, 1.23 after",
        "run      runs/demo",
        "result   runs/demo/adapter",
        "crosstune chat runs/demo",
        "crosstune merge runs/demo",
        "crosstune export runs/demo --to gguf",
    ):
        assert any(expected in line for line in lines), expected
    ending = Terminal()
    for line in lines:
        Output(ending).line(line)
    check_rows(rows_of(ending.getvalue()), width=width, source="\n".join(lines))


@pytest.mark.parametrize("width", [*WIDTHS, 20, 200])
def test_the_bar_is_whole_and_figures_are_left_out_from_the_end(width: int) -> None:
    figures = ["loss 1.0000", "left 10h00m", "12,345 tok/s", "mem 12.3 GiB", "lr 1.00e-04"]
    bar_line = BarLine(title="step 50/100", short_title="50/100", share=0.5, figures=figures)
    line = bar_line.render(width).plain
    assert cell_len(line) <= width
    bar = re.search(r"[━─]+", line)
    assert bar is not None and len(bar.group()) >= MIN_BAR
    assert bar.group().count("━") == round(len(bar.group()) / 2)
    shown = [word for word in line[bar.end() :].split("  ") if word]
    assert shown == figures[: len(shown)]
    assert len(shown) == {20: 0, 40: 2, 120: 5, 200: 5}[width]


def test_fold_aligns_with_the_text_after_a_label() -> None:
    assert fold("saved    one two three four five six seven", 33) == [
        "saved    one two three four five",
        "         six seven",
    ]
    assert fold("finished one two three four five six seven", 33)[1] == "         six seven"
    assert fold("a plain sentence of some words and more", 30)[1].startswith("  ")
    assert fold("  " + "x" * 60 + " y", 40) == ["  " + "x" * 38, "    " + "x" * 22 + " y"]
    assert fold("run      /home/someone/" + "x" * 60, 40)[1] == "         " + "x" * 31


@pytest.mark.parametrize("ends_with_evaluation", [True, False])
def test_no_line_of_steps_is_left_while_the_result_is_made(ends_with_evaluation: bool, width: int) -> None:
    stream = Terminal()
    screen = Screen(live=True, stream=stream)
    screen.on_event(TrainingStarted(num_steps=4, done=0))
    screen.on_step(step_row(4))
    screen.on_event(Evaluated(step=4, when="during", metrics={"loss": 1.0}, samples=[], seconds=1.0))
    assert screen._line.is_shown
    screen.on_event(TrainingEnded(steps=4))
    if ends_with_evaluation:
        screen.on_event(EvaluationStarted(step=4, when="after"))
        assert screen._line.is_shown
        screen.on_event(Evaluated(step=4, when="after", metrics={"loss": 1.0}, samples=[], seconds=1.0))
    assert not screen._line.is_shown
    screen.close()


@pytest.mark.parametrize(("options", "lines"), [({}, 0), ({"every": 2}, 2)])
def test_lines_above_the_live_bar_are_for_those_who_ask(
    options: dict[str, Any], lines: int, width: int
) -> None:
    stream = Terminal()
    screen = Screen(live=True, stream=stream, **options)
    assert screen.live
    screen.on_event(TrainingStarted(num_steps=4, done=0))
    for step in range(1, 5):
        screen.on_step(step_row(step))
    screen.close()
    printed = "\n".join(rows_of(stream.getvalue()))
    assert len(re.findall(r"^step [24]/4  loss", printed, re.MULTILINE)) == lines


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

    short = lines(1000, 0.05)
    assert short[0] == 1 and short[-1] == 1000 and 20 <= len(short) <= 23
    assert len(lines(1000, 0.001)) <= 3
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


def test_whether_an_answer_matches_is_marked_only_where_that_is_measured() -> None:
    sample = SampleRow(prompt="p", answer="wrong", reference="right")

    def shown(metrics: dict[str, float]) -> str:
        stream = io.StringIO()
        Screen(live=False, stream=stream).on_event(
            Evaluated(step=0, when="before", metrics=metrics, samples=[sample], seconds=1.0)
        )
        return stream.getvalue()

    assert "  x wrong" in shown({"loss": 1.0, "exact_match": 0.0})
    assert "x wrong" not in shown({"loss": 1.0})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.34567, "2.35"),
        (0.0123456, "0.0123"),
        (12345.6, "12,300"),
        (9.996, "10.00"),
        (float("nan"), "nan"),
    ],
)
def test_a_figure_has_three_significant_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_notes_about_the_data_are_printed() -> None:
    stream = io.StringIO()
    data = {"dataset": "commands", "train": {"examples": 3}, "notes": ["no --dataset was given"]}
    Screen(live=False, stream=stream).on_event(Started(folder="runs/x", data=data, num_steps=1))
    assert "note     no --dataset was given" in stream.getvalue()


def test_several_processes_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for processes in ("", "2 on cpu over gloo, full_shard"):
        Screen(live=False).on_event(
            Started(folder="runs/a", data={"dataset": "rows"}, num_steps=1, processes=processes)
        )
        assert ("ranks    2 on cpu over gloo, full_shard" in "".join(capsys.readouterr())) == bool(processes)
