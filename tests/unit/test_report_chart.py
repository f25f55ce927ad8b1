"""Numbers to curves: axes, smoothing, thinning, gaps and what the SVG holds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from markupsafe import Markup

from crosstune.report.axis import step_axis, tick_label, value_axis
from crosstune.report.chart import Chart, Mark, Scale, Series, byte_scale, draw
from crosstune.report.files import RunFiles
from crosstune.report.quantity import show_bytes
from crosstune.report.run_charts import run_moves
from crosstune.report.series import (
    Point,
    kept_indices,
    smooth,
    smoothing_window,
    step_points,
    task_metrics,
)


def readout(svg: str) -> dict:
    attribute = re.search(r'data-readout="([^"]*)"', svg)
    assert attribute
    return json.loads(Markup(attribute[1]).unescape())


@pytest.mark.parametrize(
    ("values", "from_zero", "ticks"),
    [
        ([3.2, 0.04], False, ["0", "1", "2", "3", "4"]),
        ([0.0, 2e-4], True, ["0", "5e-5", "1e-4", "1.5e-4", "2e-4"]),
        ([41000.0, 39000.0], True, ["0", "10k", "20k", "30k", "40k", "50k"]),
        ([0.0], True, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([-3.0, 5.0], False, ["−4", "−2", "0", "2", "4", "6"]),
        ([3.3612, 3.3571], False, ["3.357", "3.358", "3.359", "3.360", "3.361", "3.362"]),
        ([3.3604, 3.3601], False, ["3.3601", "3.3602", "3.3603", "3.3604"]),
    ],
)
def test_a_value_axis_ends_on_round_numbers(values: list[float], from_zero: bool, ticks: list[str]) -> None:
    assert value_axis(values, from_zero=from_zero).labels() == ticks


@pytest.mark.parametrize(
    "values", [[1.0], [0.0], [5e-324], [1e300, -1e300], [1e16, 1e16 + 2], [-2.5], [1e-9, 1.0], [0.1, 0.3]]
)
def test_a_value_axis_holds_every_value(values: list[float]) -> None:
    for from_zero in (False, True):
        axis = value_axis(values, from_zero=from_zero)
        assert axis.low < axis.high
        assert all(-1e-9 <= axis.fraction(value) <= 1 + 1e-9 for value in values)
        assert 2 <= len(axis.ticks) <= 12
        assert len(set(axis.labels())) == len(axis.ticks)


def test_a_flat_curve_is_not_read_against_zero() -> None:
    assert value_axis([3.1, 3.2], from_zero=False).low == pytest.approx(3.1)


@pytest.mark.parametrize(
    ("last", "ticks"), [(1, [0, 1]), (7, [0, 2, 4, 6]), (5000, [0, 1000, 2000, 3000, 4000, 5000])]
)
def test_step_ticks_are_whole_numbers(last: int, ticks: list[int]) -> None:
    assert list(step_axis(0, last).ticks) == ticks


def test_a_tick_has_just_the_decimals_it_needs() -> None:
    assert tick_label(2.5, gap=2.5) == "2.5"
    assert tick_label(0.30000000000000004, gap=0.1) == "0.3"
    assert tick_label(1500.0, gap=500.0) == "1,500"


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    points: list[Point] = [(float(step), math.sin(step / 40)) for step in range(1, 5001)]
    points[3333] = (3334.0, 99.0)
    points[1234] = (1235.0, -99.0)
    points[2500] = (2501.0, None)
    kept = kept_indices(points)
    assert len(kept) < 400
    assert {0, 1234, 2500, 3333, 4999} <= set(kept)
    assert kept == sorted(kept)


def test_few_points_are_all_kept() -> None:
    assert kept_indices([(1.0, 2.0), (2.0, None)]) == [0, 1]
    assert kept_indices([]) == []


def test_smoothing_is_centred_and_leaves_gaps() -> None:
    points: list[Point] = [(1.0, 1.0), (2.0, 4.0), (3.0, None), (4.0, 8.0), (5.0, 2.0)]
    assert smooth(points, window=3) == [(1.0, 2.5), (2.0, 2.5), (3.0, None), (4.0, 5.0), (5.0, 5.0)]
    assert smoothing_window(7) == 1
    assert smoothing_window(5000) % 2 == 1


def test_the_line_is_lifted_over_a_gap_and_a_lone_point_is_a_dot() -> None:
    values = [1.0, 2.0, None, 3.0, None, *[2.0] * 20]
    points: list[Point] = [(float(step), value) for step, value in enumerate(values)]
    svg = draw(Chart(title="Loss", series=[Series(label="loss", points=points)]))
    path = re.search(r'<path d="([^"]*)"', svg)
    assert path
    assert path[1].count("M") == 3
    assert svg.count("<circle") == 1
    assert "2 steps without a finite value" in svg
    assert [point[1] is None for point in readout(svg)["series"][0]["points"]] == [
        value is None for value in values
    ]


def test_one_point_is_a_dot_and_no_point_is_nothing() -> None:
    one = draw(Chart(title="Loss", series=[Series(label="loss", points=[(1.0, 2.5)])]))
    assert one.count("<circle") == 1
    assert "at step 1: only value 2.50" in one
    assert draw(Chart(title="Loss", series=[Series(label="loss", points=[])])) == ""
    assert draw(Chart(title="Loss", series=[Series(label="loss", points=[(1.0, None)])])) == ""


def test_curves_over_the_same_steps_are_read_out_together() -> None:
    raw: list[Point] = [(float(step), float(step % 7)) for step in range(2000)]
    series = [Series(label="raw", points=raw), Series(label="mean", points=smooth(raw, window=101))]
    first, second = readout(draw(Chart(title="Loss", series=series)))["series"]
    assert [point[0] for point in first["points"]] == [point[0] for point in second["points"]]


def test_bytes_are_drawn_in_their_unit() -> None:
    points: list[Point] = [(1.0, 3 * 2.0**30), (2.0, 6 * 2.0**30)]
    scale = byte_scale([value for _, value in points if value], show=show_bytes)
    svg = draw(
        Chart(title="Memory", series=[Series(label="memory", points=points)], scale=scale, from_zero=True)
    )
    assert re.findall(r'class="down"[^>]*>([^<]*)<', svg) == ["0", "2", "4", "6", "step"]
    assert "Memory in GiB" in svg
    assert readout(svg)["series"][0]["points"][1][2] == "6.00 GiB"


def test_labels_are_escaped() -> None:
    hostile = '"><script>alert(1)</script>'
    svg = draw(
        Chart(title=hostile, series=[Series(label=hostile, points=[(0.0, 1.0)])], scale=Scale(unit=hostile))
    )
    assert "<script" not in svg


def test_a_move_is_a_line_with_its_words_where_there_is_room() -> None:
    points: list[Point] = [(1.0, 3.0), (2.0, 2.0), (4.0, 1.0)]
    chart = Chart(title="Loss", series=[Series(label="each step", points=points)], steps=(0.0, 4.0))
    marked = Chart(**{**vars(chart), "marks": [Mark(step=2.0, label="mlx → <cpu>")]})
    assert "<line x1" not in draw(chart).partition('class="marks"')[2].partition("</g>")[0]
    drawn = draw(marked).partition('class="marks"')[2].partition("</g>")[0]
    assert 'x1="50.00%"' in drawn and "<text" not in drawn and "mlx → &lt;cpu&gt;" in drawn
    assert (
        "<text"
        in draw(Chart(**{**vars(marked), "wide": True})).partition('class="marks"')[2].partition("</g>")[0]
    )
    assert "mlx → &lt;cpu&gt; after step 2" in draw(marked)


def test_a_run_that_went_on_on_another_backend_is_marked_there() -> None:
    def part(backend: str, step: int, before: str) -> list[dict[str, object]]:
        return [{"kind": "loaded", "backend": backend}, {"kind": "resumed", "step": step, "backend": before}]

    first = [{"kind": "loaded", "backend": "mlx"}, {"kind": "checkpoint", "step": 4}]
    events = [*first, *part("cpu", 4, "mlx"), *part("cpu", 6, "cpu"), *part("mlx", 8, "cpu")]
    run = RunFiles(folder=Path(), events=events)
    assert [(mark.step, mark.label) for mark in run_moves(run)] == [(4.0, "mlx → cpu"), (8.0, "cpu → mlx")]


def test_the_metrics_of_a_task_are_found_among_the_columns() -> None:
    rows = [
        {"step": 1, "loss": 2.0, "examples": 8, "lr": 0.1, "close": 0.5, "tokens_per_s": 3.0},
        {"step": 2, "loss": None, "examples": 0, "lr": 0.1, "close": None, "far": 1.0, "skipped": True},
    ]
    assert task_metrics(rows) == ["close", "far"]
    assert step_points(rows, "close") == [(1.0, 0.5), (2.0, None)]
