"""Charts: axes, smoothing, downsampling, gaps, overfitting, and the SVG."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.report.charts import Chart, Mark, Series, run_charts
from crosstune.report.files import RunFiles
from crosstune.report.layout import value_axis
from crosstune.report.series import (
    Point,
    best_evaluation,
    kept_indices,
    overfitting,
    smooth,
    smoothing_window,
)
from crosstune.report.template import draw


@pytest.mark.parametrize("values", [[0.0], [5e-324], [1e300, -1e300], [1e16, 1e16 + 2], [1e-9, 1.0]])
def test_a_value_axis_covers_every_value(values: list[float]) -> None:
    for from_zero in (False, True):
        axis = value_axis(values, from_zero=from_zero)
        assert axis.low < axis.high
        assert all(-1e-9 <= axis.fraction(value) <= 1 + 1e-9 for value in values)
        assert 2 <= len(axis.ticks) <= 12
        assert len(set(axis.labels())) == len(axis.ticks)


def test_thinning_keeps_ends_extremes_and_gaps() -> None:
    points: list[Point] = [(float(step), math.sin(step / 40)) for step in range(1, 5001)]
    points[3333] = (3334.0, 99.0)
    points[1234] = (1235.0, -99.0)
    points[2500] = (2501.0, None)
    kept = kept_indices(points)
    assert len(kept) < 400 and kept == sorted(kept)
    assert {0, 1234, 2500, 3333, 4999} <= set(kept)
    assert kept_indices([(1.0, 2.0), (2.0, None)]) == [0, 1]


def test_smoothing_is_centred_and_leaves_gaps() -> None:
    points: list[Point] = [(1.0, 1.0), (2.0, 4.0), (3.0, None), (4.0, 8.0), (5.0, 2.0)]
    assert smooth(points, window=3) == [(1.0, 2.5), (2.0, 2.5), (3.0, None), (4.0, 5.0), (5.0, 5.0)]
    assert smoothing_window(7) == 1 and smoothing_window(5000) % 2 == 1


def test_labels_are_escaped() -> None:
    hostile = '"><script>alert(1)</script>'
    series = [Series(label=hostile, points=[(0.0, 1.0), (1.0, 2.0)])]
    chart = Chart(
        title=hostile, series=series, unit=hostile, x_label=hostile, marks=[Mark(at=1.0, label=hostile)]
    )
    bars = replace(chart, series=[replace(series[0], look="bars")])
    square = replace(chart, shape="square", y_label=hostile, series=[replace(series[0], look="scatter")])
    for each in (chart, replace(chart, shape="wide"), bars, square):
        assert "<script" not in draw(each)


def evaluated(losses: dict[int, float], *, train: float = 0.5, num_steps: int = 40, **more: Any) -> RunFiles:
    """A run with these evaluation losses, whose training loss falls from 3 to `train`."""
    metrics = [
        {"step": n, "loss": train + (3 - train) * (1 - n / num_steps) ** 3} for n in range(1, num_steps + 1)
    ]
    events = [
        {"kind": "evaluation", "step": step, "when": "during", "metrics": {"loss": loss}}
        for step, loss in losses.items()
    ]
    return RunFiles(folder=Path("runs/a"), metrics=metrics, events=events, **more)


OVERFITTING = {0: 3.2, 10: 1.9, 20: 1.4, 30: 1.6, 40: 2.0}


def test_the_best_evaluation_and_overfitting() -> None:
    run = evaluated(OVERFITTING)
    best, found = best_evaluation(run), overfitting(run)
    assert best and (best.step, best.loss, best.is_last, best.overfits) == (20, 1.4, False, True)
    assert found and found.step in (10, 20) and found.evaluation == 2.0 and found.train < 0.8
    loss = run_charts(run)[0]
    assert {mark.look for mark in loss.marks} == {"best", "overfit"} and loss.logarithmic is not None
    assert loss.notes[0] == "Best evaluation: 1.40 at step 20; the last one is 2.00."


@pytest.mark.parametrize("losses", [{0: 3.0, 20: 0.8, 40: 0.52}, {10: 2.9, 20: 2.9, 40: 0.5}, {}])
def test_a_gap_that_is_small_or_closes_is_no_overfitting(losses: dict[int, float]) -> None:
    best = best_evaluation(evaluated(losses))
    assert overfitting(evaluated(losses)) is None
    assert best is None if not losses else best is not None and best.is_last and not best.overfits


def test_the_loss_is_also_drawn_over_tokens_and_time() -> None:
    run = evaluated(OVERFITTING)
    assert [label for label, _ in run_charts(run)[0].views] == ["step", "log scale"], (
        "nothing else is recorded"
    )
    metrics = [row | {"tokens": 100 + 50 * (row["step"] > 20), "step_s": 30.0} for row in run.metrics]
    views = dict(run_charts(replace(run, metrics=metrics))[0].views)
    assert list(views) == ["step", "tokens", "minutes", "log scale"]
    losses, _, evaluations = views["tokens"].series
    assert [at for at, _ in losses.points] == [100.0 * n for n in range(1, 21)] + [
        2000 + 150.0 * n for n in range(1, 21)
    ]
    assert evaluations.points == [(0, 3.2), (1000, 1.9), (2000, 1.4), (3500, 1.6), (5000, 2.0)]
    assert next(mark.at for mark in views["tokens"].marks if mark.look == "best") == 2000
    assert views["minutes"].span == (0, 20)
    assert views["minutes"].series[2].points[2] == (10, 1.4)
