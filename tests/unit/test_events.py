"""The events of a run: the rows they become in events.jsonl, and whether the screen shows them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from crosstune.config.resolve.plan import Adjustment
from crosstune.core import events
from crosstune.core.events import Event
from crosstune.core.loss_measurement import Comparison, LossMeasurement
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord
from crosstune.loop.profile_result import PhaseClock, profile_result
from crosstune.tracking import tracker as tracking_events

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
MEASURED = LossMeasurement(**MEASURED_ROW)
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
PROFILE = profile_result(
    PhaseClock(seconds={"forward": 0.5}, steps={2: 1.0}), [], None, engine="torch", other_steps_s=[]
)
LOADED = {"name": "run", "backend": "cpu", "engine": "torch", "checkpoint": None, "result": None}
RESUMED = {"checkpoint": "c", "step": 4, "backend": "cpu", "adapted": ["a"], "allowed_differences": ["b"]}
SAVED = {"step": 4, "path": "p", "bytes": 9, "blocked_s": 0.1, "seconds": 0.2, "removed": ["step-00000001"]}
RECOVERED = {"step": 3, "doing": "a step", "cause": "2 GiB", "changed": {"batch_size": 2}}
ADJUSTED = Adjustment(option="precision", requested="bf16", used="fp32", reason="no bf16", kind="change")
ADJUSTED_ROW = {"option": "precision", "asked": "bf16", "used": "fp32", "reason": "no bf16", "sort": "change"}

# Events whose rows are their fields. Reports read rows of older runs: only additions may change these tables.
FIELDS: list[tuple[type[Event], str, dict[str, Any]]] = [
    (events.Warned, "warning", {"message": "slow"}),
    (events.Warned, "warning", {"message": "slow", "step": 0}),
    (
        events.ModelProgress,
        "model_progress",
        {"stage": "downloading", "done": 3, "total": None, "model": "m"},
    ),
    (events.Tokenizing, "tokenizing", {"source": "s", "done_bytes": 1, "total_bytes": 2, "examples": 3}),
    (events.RunMovedAside, "moved_aside", {"path": "run~1"}),
    (events.Started, "start", {"folder": "run", "data": {"dataset": "d"}, "num_steps": 8}),
    (events.Loading, "loading", {"model": "m"}),
    (events.Loaded, "loaded", LOADED | {"trained_parameters": 1, "parameters": 10}),
    (events.Resumed, "resumed", RESUMED | {"changed_options": [], "engine": "torch"}),
    (events.CheckpointSetAside, "set_aside", {"path": "p", "step": 4}),
    (events.TrainingStarted, "training", {"num_steps": 8, "done": 0}),
    (events.TrainingEnded, "training_end", {"steps": 8}),
    (events.EvaluationStarted, "evaluation_start", {"step": 0, "when": "before"}),
    (events.Evaluating, "evaluating", {"done": 1, "total": 2}),
    (
        events.Evaluated,
        "evaluation",
        {"step": 0, "when": "before", "metrics": {"loss": 2.0}, "samples": [SAMPLE], "seconds": 0.5},
    ),
    (events.CheckpointSaved, "checkpoint", SAVED),
    (events.CheckpointFailed, "checkpoint_failed", {"step": 4, "error": "full"}),
    (
        events.NonFinite,
        "nonfinite",
        {"step": 4, "error": "nan", "blame": "in layer 2", "examples": [7], "skipped": True, "allowed": 1},
    ),
    (events.Profiled, "profile", {"path": "p/profile.txt", "folder": "p", "result": PROFILE}),
    (events.ResultSaved, "saved", {"path": "adapter", "step": 8}),
    (
        events.ResultSaved,
        "saved",
        {"path": "m", "step": 8, "against_trained": {"original": {"relative": 0.1}}},
    ),
    (
        tracking_events.TrackingStarted,
        "tracking",
        {"tracker": "wandb", "where": "https://x", "view": "open it"},
    ),
    (tracking_events.TrackingFailed, "tracking_failed", {"tracker": "wandb", "error": "no key", "step": 3}),
    (tracking_events.TrackingWaits, "tracking_waits", {"trackers": ["wandb"], "seconds": 60.0}),
    (events.Stopped, "stopped", {"reason": "Ctrl-C", "step": 4, "num_steps": 8}),
    (events.Interrupted, "stopped", {"error": "KeyboardInterrupt: ", "step": 4}),
    (events.Failed, "failed", {"error": "lost", "step": 4}),
    (events.Recovered, "recovery", RECOVERED | {"next_time": "--batch_size 2"}),
]
ROWS: list[tuple[Event, str, dict[str, Any]]] = [
    *((found(**row), kind, row) for found, kind, row in FIELDS),
    (ADJUSTED.to_event(), "adjustment", ADJUSTED_ROW | {"sentence": "precision: bf16 -> fp32 (no bf16)"}),
    (events.LossMeasured(measured=MEASURED), "measured", MEASURED_ROW),
    (events.LossCompared(comparison=COMPARISON), "compared", COMPARISON_ROW),
    (events.Moved(comparison=COMPARISON), "moved", COMPARISON_ROW),
]
CLASSES = {
    found
    for found in [*vars(events).values(), *vars(tracking_events).values()]
    if isinstance(found, type) and issubclass(found, Event) and found is not Event
}


def test_the_rows_of_events_are_a_file_format(tmp_path: Path) -> None:
    assert {type(event) for event, _, _ in ROWS} == CLASSES
    record = RunRecord.create(tmp_path / "run", config_yaml="", plan={})
    for event, _, _ in ROWS:
        record.on_event(event)
    record.finish({})
    written = read_jsonl(tmp_path / "run" / "events.jsonl")
    for (event, kind, row), found in zip(ROWS, written, strict=True):
        assert event.kind == kind and list(event.to_json().items()) == list(row.items())
        assert list(found) == ["time", "kind", *row], "the report shows fields in their order"
        assert found == {"time": found["time"], "kind": kind} | json.loads(json.dumps(row))
