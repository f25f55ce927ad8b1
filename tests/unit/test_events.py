"""The events of a run: the rows they become in events.jsonl, and whether the screen shows them."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.event_lines import event_lines
from crosstune.cli.screen import NOT_SHOWN, Screen
from crosstune.config.plan import Adjustment
from crosstune.core import events, tracking_events
from crosstune.core.events import Event
from crosstune.core.json_files import read_jsonl
from crosstune.core.measured import Comparison, Measured
from crosstune.core.record import RunRecord
from crosstune.loop.phase_clock import PhaseClock
from crosstune.loop.profile_result import profile_result
from crosstune.report.event_log import NOTABLE_KINDS

MEASURED_ROW: dict[str, Any] = {
    "step": 4,
    "first_step": 4,
    "num_steps": 2,
    "loss": 1.5,
    "num_supervised": 64,
    "backend": "cpu",
    "precision": "fp32",
    "quantization": None,
}
MEASURED = Measured(**MEASURED_ROW)
COMPARISON = Comparison(
    there=MEASURED,
    here=dataclasses.replace(MEASURED, backend="mlx", loss=1.6),
    difference=0.06,
    bound=0.02,
    within=False,
    same_rows=True,
)
COMPARISON_ROW: dict[str, Any] = {
    "from": MEASURED_ROW,
    "to": MEASURED_ROW | {"backend": "mlx", "loss": 1.6},
    "difference": 0.06,
    "bound": 0.02,
    "within": False,
    "same_rows": True,
}
SAMPLE: events.SampleRow = {"prompt": "1 + 1", "answer": "2", "reference": "2"}

# An event, its kind and its row. Reports read rows of older runs: only additions may change this table.
PROFILE = profile_result(
    PhaseClock(seconds={"forward": 0.5}, steps={2: 1.0}), [], None, engine="torch", other_steps_s=[]
)
ROWS: list[tuple[Event, str, dict[str, Any]]] = [
    (events.Warned(message="slow"), "warning", {"message": "slow"}),
    (events.Warned(message="slow", step=0), "warning", {"message": "slow", "step": 0}),
    (
        Adjustment(
            option="precision", requested="bf16", used="fp32", reason="no bf16", kind="change"
        ).to_event(),
        "adjustment",
        {
            "option": "precision",
            "asked": "bf16",
            "used": "fp32",
            "reason": "no bf16",
            "sort": "change",
            "sentence": "precision: bf16 -> fp32 (no bf16)",
        },
    ),
    (
        events.ModelProgress(stage="downloading", done=3, total=None, model="m"),
        "model_progress",
        {"stage": "downloading", "done": 3, "total": None, "model": "m"},
    ),
    (
        events.Tokenizing(source="s", done_bytes=1, total_bytes=2, examples=3),
        "tokenizing",
        {"source": "s", "done_bytes": 1, "total_bytes": 2, "examples": 3},
    ),
    (events.RunMovedAside(path="run~1"), "moved_aside", {"path": "run~1"}),
    (
        events.Started(folder="run", data={"dataset": "d"}, num_steps=8),
        "start",
        {"folder": "run", "data": {"dataset": "d"}, "num_steps": 8},
    ),
    (events.Loading(model="m"), "loading", {"model": "m"}),
    (
        events.Loaded(
            name="run",
            backend="cpu",
            engine="torch",
            checkpoint=None,
            result=None,
            trained_parameters=1,
            parameters=10,
        ),
        "loaded",
        {
            "name": "run",
            "backend": "cpu",
            "engine": "torch",
            "checkpoint": None,
            "result": None,
            "trained_parameters": 1,
            "parameters": 10,
        },
    ),
    (
        events.Resumed(
            checkpoint="c",
            step=4,
            backend="cpu",
            adapted=["a"],
            allowed_differences=["b"],
            changed_options=[],
            engine="torch",
        ),
        "resumed",
        {
            "checkpoint": "c",
            "step": 4,
            "backend": "cpu",
            "adapted": ["a"],
            "allowed_differences": ["b"],
            "changed_options": [],
            "engine": "torch",
        },
    ),
    (events.CheckpointSetAside(path="p", step=4), "set_aside", {"path": "p", "step": 4}),
    (events.LossMeasured(measured=MEASURED), "measured", MEASURED_ROW),
    (events.LossCompared(comparison=COMPARISON), "compared", COMPARISON_ROW),
    (events.Moved(comparison=COMPARISON), "moved", COMPARISON_ROW),
    (events.TrainingStarted(num_steps=8, done=0), "training", {"num_steps": 8, "done": 0}),
    (events.TrainingEnded(steps=8), "training_end", {"steps": 8}),
    (
        events.EvaluationStarted(step=0, when="before"),
        "evaluation_start",
        {"step": 0, "when": "before"},
    ),
    (events.Evaluating(done=1, total=2), "evaluating", {"done": 1, "total": 2}),
    (
        events.Evaluated(step=0, when="before", metrics={"loss": 2.0}, samples=[SAMPLE], seconds=0.5),
        "evaluation",
        {"step": 0, "when": "before", "metrics": {"loss": 2.0}, "samples": [SAMPLE], "seconds": 0.5},
    ),
    (
        events.CheckpointSaved(
            step=4, path="p", bytes=9, blocked_s=0.1, seconds=0.2, removed=["step-00000001"]
        ),
        "checkpoint",
        {
            "step": 4,
            "path": "p",
            "bytes": 9,
            "blocked_s": 0.1,
            "seconds": 0.2,
            "removed": ["step-00000001"],
        },
    ),
    (events.CheckpointFailed(step=4, error="full"), "checkpoint_failed", {"step": 4, "error": "full"}),
    (
        events.NonFinite(step=4, error="nan", blame="in layer 2", examples=[7], skipped=True, allowed=1),
        "nonfinite",
        {
            "step": 4,
            "error": "nan",
            "blame": "in layer 2",
            "examples": [7],
            "skipped": True,
            "allowed": 1,
        },
    ),
    (
        events.Profiled(path="p/profile.txt", folder="p", result=PROFILE),
        "profile",
        {"path": "p/profile.txt", "folder": "p", "result": PROFILE},
    ),
    (events.ResultSaved(path="adapter", step=8), "saved", {"path": "adapter", "step": 8}),
    (
        events.ResultSaved(path="model", step=8, against_trained={"original": {"relative": 0.1}}),
        "saved",
        {"path": "model", "step": 8, "against_trained": {"original": {"relative": 0.1}}},
    ),
    (
        tracking_events.TrackingStarted(tracker="wandb", where="https://x", view="open https://x"),
        "tracking",
        {"tracker": "wandb", "where": "https://x", "view": "open https://x"},
    ),
    (
        tracking_events.TrackingFailed(tracker="wandb", error="no key", step=3),
        "tracking_failed",
        {"tracker": "wandb", "error": "no key", "step": 3},
    ),
    (
        tracking_events.TrackingWaits(trackers=["wandb"], seconds=60.0),
        "tracking_waits",
        {"trackers": ["wandb"], "seconds": 60.0},
    ),
    (
        events.Stopped(reason="Ctrl-C", step=4, num_steps=8),
        "stopped",
        {"reason": "Ctrl-C", "step": 4, "num_steps": 8},
    ),
    (
        events.Interrupted(error="KeyboardInterrupt: ", step=4),
        "stopped",
        {"error": "KeyboardInterrupt: ", "step": 4},
    ),
    (events.Failed(error="lost", step=4), "failed", {"error": "lost", "step": 4}),
    (
        events.Recovered(
            step=3,
            doing="a step",
            cause="2 GiB",
            changed={"batch_size": 2},
            next_time="--batch_size 2",
        ),
        "recovery",
        {
            "step": 3,
            "doing": "a step",
            "cause": "2 GiB",
            "changed": {"batch_size": 2},
            "next_time": "--batch_size 2",
        },
    ),
]
CLASSES = {
    found
    for found in [*vars(events).values(), *vars(tracking_events).values()]
    if isinstance(found, type) and issubclass(found, Event) and found is not Event
}
SHOWN = {*vars(Screen)["on_event"].dispatcher.registry, *event_lines.registry} - {object, Event}
# The first sets up the live bar; the second prints once it has taken a while.
QUIET = (events.TrainingStarted, events.TrainingEnded, events.ModelProgress, events.Tokenizing)


@pytest.mark.parametrize(("event", "kind", "row"), ROWS, ids=lambda value: type(value).__name__)
def test_an_event_becomes_the_row_it_always_was(
    tmp_path: Path, event: Event, kind: str, row: dict[str, Any]
) -> None:
    assert event.kind == kind
    assert list(event.to_json().items()) == list(row.items()), "the report shows fields in their order"
    record = RunRecord.create(tmp_path / "run", config_yaml="", plan={})
    record.on_event(event)
    record.finish({})
    [written] = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert list(written) == ["time", "kind", *row]
    assert written == {"time": written["time"], "kind": kind} | json.loads(json.dumps(row))


def test_every_event_class_has_its_row_in_this_table() -> None:
    assert {type(event) for event, _, _ in ROWS} == CLASSES


@pytest.mark.parametrize(
    "found", sorted(CLASSES, key=lambda found: found.__name__), ids=lambda found: found.__name__
)
def test_an_event_is_frozen_and_takes_its_own_fields_alone(found: type[Event]) -> None:
    event = next(event for event, _, _ in ROWS if type(event) is found)
    values = vars(event)
    assert not {"time", "kind"} & {*values, *event.to_json()}, "a row has these of its own"
    with pytest.raises(TypeError, match="mesage"):
        found(**values, mesage="misspelt")
    with pytest.raises(TypeError):
        found(*values.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(event, next(iter(values)), None)


def test_the_screen_shows_every_event_or_names_it_as_not_shown() -> None:
    assert SHOWN | set(NOT_SHOWN) == CLASSES
    assert not SHOWN & set(NOT_SHOWN)


@pytest.mark.parametrize("event", [event for event, _, _ in ROWS], ids=lambda event: type(event).__name__)
def test_the_screen_prints_a_line_for_an_event(event: Event) -> None:
    stream = io.StringIO()
    screen = Screen(live=False, verbose=True, stream=stream)
    screen.on_event(event)
    screen.close()
    assert bool(stream.getvalue()) == (not isinstance(event, (*NOT_SHOWN, *QUIET)))


def test_the_report_points_out_the_kinds_it_always_did() -> None:
    always = {"warning", "failed", "stopped", "nonfinite", "checkpoint_failed", "moved"}
    assert always | {"tracking_failed"} == NOTABLE_KINDS
