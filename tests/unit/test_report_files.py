"""Loading a run: missing, cut, damaged and resumed records; how it ended; numbers for people."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.report import RunFiles, load_run
from crosstune.report.files import number
from crosstune.report.metric import change_between, display_of
from crosstune.report.outcome import end_of, evaluations, totals, training_loss
from crosstune.report.quantity import show_bytes, show_count, show_number, show_rate, show_seconds, show_share


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_a_folder_without_a_run_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    for folder, said in ((tmp_path, "is not a run folder"), (tmp_path / "nowhere", "There is no run")):
        with pytest.raises(UserError, match=said):
            load_run(folder)


def test_a_plan_alone_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"name": "alone"}')
    run = load_run(tmp_path)
    assert run.name == "alone"
    assert run.missing == ("config.yaml", "metrics.jsonl", "events.jsonl", "summary.json")
    assert run.problems == ()


def test_what_cannot_be_read_is_said_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"name": ')
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    (tmp_path / "events.jsonl").write_text('3\n{"kind": "warning", "message": "kept"}\n{"kind": "cut')
    run = load_run(tmp_path)
    assert run.asked == {"lr": 0.1}
    assert [event["message"] for event in run.events] == ["kept"]
    assert [problem.split()[0] for problem in run.problems] == ["metrics.jsonl", "plan.json", "summary.json"]


def test_a_resumed_run_takes_back_the_steps_it_repeats(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    rows = [{"step": step, "loss": 1.0} for step in (1, 2, 3, 4)] + [
        {"step": step, "loss": 2.0} for step in (3,)
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    run = load_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.metrics] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert run.num_repeated_steps == 2
    assert run.last_step == 3


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), 10**400, [], {}])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number(value) is None


@pytest.mark.parametrize(
    ("summary", "events", "silence_s", "status", "said"),
    [
        ({"status": "finished"}, [], 0, "finished", ""),
        ({"status": "failed", "error": "no memory"}, [], 0, "failed", "no memory"),
        ({"status": "stopped"}, [{"kind": "stopped", "reason": "SIGTERM"}], 0, "stopped", "SIGTERM"),
        ({"status": "stopped", "error": "KeyboardInterrupt"}, [], 0, "stopped", "KeyboardInterrupt"),
        ({}, [{"kind": "failed", "error": "bad news"}], 0, "failed", "bad news"),
        ({}, [], 30, "running", "less than a minute"),
        ({}, [], 7200, "stopped", "2 h 00 min"),
    ],
)
def test_how_a_run_ended(summary: dict, events: list[dict], silence_s: float, status: str, said: str) -> None:
    run = RunFiles(
        folder=Path("run"), summary=summary, events=events, read_time=1e9 + silence_s, last_write_time=1e9
    )
    end = end_of(run)
    assert end.status == status
    assert said in end.detail


def test_silence_is_measured_by_the_slowest_step() -> None:
    slow = [{"step": 1, "step_s": 1000.0}]
    run = RunFiles(folder=Path("run"), metrics=slow, read_time=1e9 + 5000, last_write_time=1e9)
    assert end_of(run).status == "running"


def test_the_last_write_is_that_of_the_newest_file(tmp_path: Path) -> None:
    for name, moment in (("plan.json", 1000), ("metrics.jsonl", 2000)):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (moment, moment))
    assert load_run(tmp_path).last_write_time == 2000


def test_without_a_summary_everything_comes_from_the_records() -> None:
    steps = [
        {
            "step": 1,
            "loss": 4.0,
            "tokens": 100,
            "supervised_tokens": 10,
            "step_s": 1.0,
            "memory_bytes": 2**30,
        },
        {
            "step": 2,
            "loss": 2.0,
            "tokens": 300,
            "supervised_tokens": 30,
            "step_s": 1.0,
            "memory_bytes": 2**31,
        },
    ]
    events = [
        {"kind": "evaluation", "step": 0, "when": "before", "metrics": {"exact_match": 0.25, "loss": 4.0}},
        {"kind": "evaluation", "step": 2, "when": "during", "metrics": {"exact_match": 0.5, "loss": 1.0}},
    ]
    run = RunFiles(folder=Path("run"), plan={"num_steps": 8}, metrics=steps, events=events)
    shown = {total.label: (total.value.text, total.detail) for total in totals(run)}
    assert shown["Steps"] == ("2", "of 8 planned")
    assert shown["Tokens"] == ("400", "40 carry loss")
    assert shown["Speed"][0] == "200 tok/s"
    assert shown["Peak memory"][0] == "2.00 GiB"
    loss, match = evaluations(run)
    assert loss.before and loss.after and loss.change
    assert (loss.before.text, loss.after.text, loss.after_label) == ("4.00", "1.00", "at step 2")
    assert (loss.change.amount.text, loss.change.verdict) == ("−75\N{NO-BREAK SPACE}%", "better")
    assert match.change and match.change.amount.text == "+25.0 points"
    trained = training_loss(run)
    assert trained and trained.change and trained.change.amount.text == "−50\N{NO-BREAK SPACE}%"


def test_a_metric_whose_name_says_nothing_is_not_judged() -> None:
    assert change_between(1.0, 2.0, display_of("mean_length", [1.0, 2.0])).verdict == ""
    assert change_between(1.0, 2.0, display_of("eval_loss", [1.0, 2.0])).verdict == "worse"
    assert change_between(0.5, 0.4, display_of("judge/accuracy", [0.5, 0.4])).verdict == "worse"
    assert change_between(2.0, 2.0, display_of("loss", [2.0])).verdict == "unchanged"
    bleu = display_of("bleu", [0.1, 30.0])
    assert bleu.label == "BLEU" and change_between(0.1, 30.0, bleu).amount.text == "+29.9 points"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (show_bytes(11511234567), "10.7 GiB"),
        (show_bytes(512), "512 B"),
        (show_seconds(0.42), "0.42 s"),
        (show_seconds(59.96), "60 s"),
        (show_seconds(723.4), "12 min 03 s"),
        (show_seconds(7211), "2 h 00 min"),
        (show_seconds(200000), "2 d 7 h"),
        (show_count(634880), "634,880"),
        (show_count(139399488), "139 M"),
        (show_count(7241732096), "7.24 B"),
        (show_rate(38211.4), "38,211 tok/s"),
        (show_rate(4.5678), "4.57 tok/s"),
        (show_number(0.0412345), "0.0412"),
        (show_number(-1234.5678), "−1,235"),
        (show_number(1.5e-7), "1.5e-7"),
        (show_share(0.00067), "0.067\N{NO-BREAK SPACE}%"),
        (show_share(1.0), "100\N{NO-BREAK SPACE}%"),
    ],
)
def test_numbers_read_well(shown: tuple[str, str], text: str) -> None:
    assert shown[0] == text
    assert shown[1]
