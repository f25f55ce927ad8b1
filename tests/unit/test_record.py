"""The run directory: what is written can be read back, at any moment, and nothing is overwritten."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.core.events import Warned
from crosstune.files.json_files import read_jsonl
from crosstune.files.run_record import RunRecord, holds_run, move_aside


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
    with pytest.raises(UserError, match="already holds a run"):
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
    assert not holds_run(tmp_path / "run")
    assert (tmp_path / "run~1" / "config.yaml").read_text() == "one"
    assert (tmp_path / "run~2" / "config.yaml").read_text() == "two"


def test_a_line_cut_by_a_kill_is_left_out_but_a_bad_one_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    assert read_jsonl(path) == [{"step": 1}]
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(UserError, match="line 1"):
        read_jsonl(path)
