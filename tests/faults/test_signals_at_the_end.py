"""A signal during the write of the result leaves a complete result or none."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from crosstune.checkpoint.read import newest_valid
from crosstune.cli.main import main
from crosstune.models.file_hashes import check_checksums, write_checksums

TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.mark.parametrize(("signals", "code"), [([INT], 0), ([TERM, HUP, TERM], 0), ([INT, INT], 130)])
def test_while_the_result_is_written(
    signals: list[signal.Signals],
    code: int,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(json.dumps({"prompt": "one", "completion": "two"}) + "\n")

    def interrupt(folder: Path) -> None:
        for number in signals:
            os.kill(os.getpid(), number)
        write_checksums(folder)

    monkeypatch.setattr("crosstune.runs.save_result.write_checksums", interrupt)
    words = [
        "--dataset",
        "data.jsonl",
        "--backend",
        "cpu",
        "--precision",
        "fp32",
        "--skip_eval",
        "--max_steps",
        "2",
        "--name",
        "run",
    ]
    assert main(["train", "--model_name", str(tiny_model), *words]) == code
    run = Path("runs/run")
    kept = newest_valid(run / "checkpoints")
    assert kept is not None and kept.step == 2
    assert not list(run.glob(".result*")), "nothing half-made is left"
    summary = json.loads((run / "summary.json").read_text())
    if code == 0:
        check_checksums(run / "adapter")
        assert (summary["status"], Path(summary["result"]).name) == ("finished", "adapter")
    else:
        assert not (run / "adapter").exists() and summary["result"] is None
        assert summary["status"] == "stopped"
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        assert main(["train", "--resume", "runs/run"]) == 0, "the result is made by the next start"
        check_checksums(run / "adapter")
