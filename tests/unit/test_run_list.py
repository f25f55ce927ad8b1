"""Lists of runs: finished, running and damaged runs, and unrelated files next to them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.files import run_lock
from crosstune.report.files import load_run
from crosstune.report.outcome import end_of
from crosstune.report.run_list import ListedRun, read_listed, run_folders

Captured = pytest.CaptureFixture[str]


def make_run(folder: Path, *, status: str | None = "finished", steps: int = 4, **summary: Any) -> Path:
    """A run of two evaluations, without a summary unless it has a status."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "options": {"recipe": "sft", "model_name": "org/model"},
        "model": {"name": "org/model"},
        "method": "lora",
        "quantizer": "bnb",
        "num_steps": 10,
    }
    rows = [
        {"step": n, "loss": 4.0 / n, "tokens": 100, "step_s": 0.5, "memory_bytes": n << 20}
        for n in range(1, steps + 1)
    ]
    events = [
        {"kind": "evaluation", "step": n, "when": "during", "metrics": {"loss": loss}}
        for n, loss in ((0, 5.0), (2, 1.5), (4, 1.75))
    ]
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    if status is not None:
        evaluations = {"0": 5.0, "2": 1.5, "4": 1.75}
        written = {"status": status, "steps": steps, "final_loss": 1.0, "evaluations": evaluations}
        written |= {"tokens_per_s": 250.0, "peak_memory_bytes": 3 << 30} | summary
        (folder / "summary.json").write_text(json.dumps(written))
    return folder


def listed(parent: Path) -> dict[str, ListedRun]:
    return {path.name: read_listed(path, changed=changed) for path, changed in run_folders(parent)}


def test_the_figures_of_a_finished_run(tmp_path: Path) -> None:
    made = listed(make_run(tmp_path / "runs" / "a").parent)["a"]
    assert (made.status, made.recipe, made.model, made.method) == (
        "finished",
        "sft",
        "org/model",
        "lora + bnb",
    )
    assert (made.steps, made.num_steps, made.loss) == (4, 10, 1.0)
    assert (made.best_eval, made.best_step) == (1.5, 2)
    assert (made.tokens_per_s, made.peak_memory_bytes) == (250.0, 3 << 30)


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "a", status=None)
    with run_lock.hold(folder):
        made = listed(folder.parent)["a"]
        assert (made.status, made.steps, made.loss, made.best_step) == ("running", 4, 1.0, 2)
        assert (made.tokens_per_s, made.peak_memory_bytes) == (200.0, 4 << 20)
    assert listed(folder.parent)["a"].status == "killed"


def test_a_resumed_run_is_running_although_its_last_end_is_recorded(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "a", status="stopped", steps=3)
    with run_lock.hold(folder):
        assert listed(folder.parent)["a"].status == "stopped"
        later = time.time() + 5
        os.utime(folder / "plan.json", (later, later))  # resuming writes it again
        assert listed(folder.parent)["a"].status == "running"
        assert end_of(load_run(folder)).status == "running"


def test_asking_whether_a_run_is_live_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "a", status=None)
    assert run_lock.is_held(folder) is None  # it was never locked
    with run_lock.hold(folder):
        assert run_lock.is_held(folder) is True
    for _ in range(3):
        assert run_lock.is_held(folder) is False
        with run_lock.hold(folder):
            pass


def test_damaged_and_foreign_entries_do_not_hide_the_others(tmp_path: Path, capsys: Captured) -> None:
    runs = make_run(tmp_path / "runs" / "good").parent
    for name, text in (("plan.json", "{"), ("summary.json", "[1]"), ("metrics.jsonl", "\x00\xff")):
        broken = make_run(runs / f"broken-{name}", status=None if name == "metrics.jsonl" else "finished")
        (broken / name).write_text(text, encoding="utf-8")
    half = runs / "half"
    half.mkdir()
    (half / "config.yaml").write_text("lr: 1\n")
    (runs / "notes").mkdir()
    (runs / "file.txt").write_text("x")
    (runs / "link").symlink_to("good")
    (runs / "loop").symlink_to("loop")
    (runs / "dead").symlink_to("nowhere")
    (runs / "control\x1b[31m").mkdir()
    (runs / "control\x1b[31m" / "plan.json").write_text("{}")
    found = listed(runs)
    assert set(found) == {"good", "link", "half", "control\x1b[31m"} | {
        f"broken-{name}" for name in ("plan.json", "summary.json", "metrics.jsonl")
    }
    assert found["link"].steps == 4
    assert found["broken-plan.json"].status == "finished" and found["broken-plan.json"].problems
    assert found["broken-summary.json"].problems and found["broken-summary.json"].best_eval == 1.5
    assert found["half"].status == "unknown"
    assert main(["runs", "--output_dir", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "broken-plan.json: plan.json could not be read" in out


def test_the_command_says_what_is_left_out(tmp_path: Path, capsys: Captured) -> None:
    for number in range(3):
        folder = make_run(tmp_path / f"run-{number}", status="failed" if number else "finished")
        for path in folder.iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    assert main(["runs", "--output_dir", str(tmp_path), "--last", "2"]) == 0
    out = capsys.readouterr().out
    assert out.index("run-2") < out.index("run-1") and "run-0" not in out
    assert "2 of 3 runs; --all lists all" in out
    assert main(["runs", "--output_dir", str(tmp_path), "--status", "finished", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["run-0"]
    assert main(["runs", "--output_dir", str(tmp_path), "--status", "running"]) == 0
    assert "There are no such runs" in capsys.readouterr().out
    assert main(["runs", "--output_dir", str(tmp_path / "none")]) == 2
    assert "No runs folder at" in capsys.readouterr().err
