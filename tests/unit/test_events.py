"""The run directory: records are read back, nothing is overwritten, and events become rows."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.resolve.plan import Adjustment
from crosstune.core import events
from crosstune.core.errors import UserError
from crosstune.core.events import Event, Warned
from crosstune.core.loss_measurement import Comparison, LossMeasurement
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord, is_run_folder, move_aside
from crosstune.loop.profile import PhaseClock, profile_result
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
    (events.RewardPrinted, "reward_output", {"reward": "good", "text": "one answer"}),
    (events.RunMovedAside, "moved_aside", {"path": "run~1"}),
    (events.Started, "start", {"folder": "run", "data": {"dataset": "d"}, "num_steps": 8}),
    (events.Loaded, "loaded", LOADED | {"trained_parameters": 1, "parameters": 10}),
    (events.Resumed, "resumed", RESUMED | {"changed_options": [], "engine": "torch"}),
    (events.CheckpointSetAside, "set_aside", {"path": "p", "step": 4}),
    (events.TrainingStarted, "training", {"num_steps": 8, "done": 0}),
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


def test_the_rows_of_events_are_a_file_format(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", config_yaml="", plan={})
    for event, _, _ in ROWS:
        record.on_event(event)
    record.finish({})
    written = read_jsonl(tmp_path / "run" / "events.jsonl")
    for (event, kind, row), found in zip(ROWS, written, strict=True):
        assert event.kind == kind and list(event.to_json().items()) == list(row.items())
        assert list(found) == ["time", "kind", *row], "the report shows fields in their order"
        assert found == {"time": found["time"], "kind": kind} | json.loads(json.dumps(row))


def test_lines_are_on_disk_as_soon_as_they_are_said(tmp_path: Path) -> None:
    record = RunRecord.create(tmp_path / "run", config_yaml="lr: 1\n", plan={"a": 1})
    record.on_step({"step": 1, "loss": 0.1 + 0.2})
    record.on_event(Warned(message="x"))
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 0.1 + 0.2}]
    assert read_jsonl(tmp_path / "run" / "events.jsonl")[0]["kind"] == "warning"
    record.finish({"status": "finished", "loss": math.nan})
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == {"status": "finished", "loss": None}


def test_a_folder_with_a_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    RunRecord.create(tmp_path / "run", config_yaml="lr: 1\n", plan={}).finish({"status": "finished"})
    with pytest.raises(UserError, match="already contains a run"):
        RunRecord.create(tmp_path / "run", config_yaml="lr: 2\n", plan={})
    assert (tmp_path / "run" / "config.yaml").read_text() == "lr: 1\n"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("precious")
    with pytest.raises(UserError, match="is a file"):
        RunRecord.create(tmp_path / "run", config_yaml="", plan={})
    assert (tmp_path / "run").read_text() == "precious"


def test_moving_aside_keeps_every_older_run(tmp_path: Path) -> None:
    for text in ("one", "two"):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.yaml").write_text(text)
        move_aside(tmp_path / "run")
    assert not is_run_folder(tmp_path / "run")
    assert (tmp_path / "run~1" / "config.yaml").read_text() == "one"
    assert (tmp_path / "run~2" / "config.yaml").read_text() == "two"


def test_a_line_cut_by_a_kill_is_left_out_but_a_bad_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 1"):
        read_jsonl(path)
