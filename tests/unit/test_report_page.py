"""The report page: numbers, escaping, policy, outcome, samples, next steps, and damaged run folders."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, SUMMARY, Page, damaged, evaluation, make_run, render_page, write_lines

from crosstune.cli.commands.train import try_report
from crosstune.cli.terminal.screen import Screen
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.files import run_lock
from crosstune.models.tiny import tiny_model
from crosstune.recipes.sft import SftRecipe
from crosstune.report import RunFiles, load_run, write_report
from crosstune.report.comparison import compare_runs, write_comparison
from crosstune.report.formatting import change_between, display_of, page_metrics, show_option
from crosstune.report.judge_section import TITLES
from crosstune.report.next_steps import use_result
from crosstune.report.outcome import end_of, evaluations, totals, training_loss
from crosstune.report.run_list import read_listed
from crosstune.report.samples import collect_samples, lead_sample
from crosstune.report.tables import event_rows, masked_example


def test_the_page_shows_the_numbers(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    words = page.words()
    for text in (
        "Trained tiny/model with LoRA adapters on 320 examples of commands for 40 steps in 33.4 s on cpu.",
        "the loss fell from 3.21 to 0.0412 and exact match rose from 0 % to 95 %",
        "−98.7 %, better",
        "+95.0 points, better",
        "634,880",
        "240,840 supervised",
        "38,211 tok/s",
        "25 % of 8.00 GiB",
        "3.5 % of 139 M",
        "2025-11-03 14:03 UTC+01:00",
        "no GPU <here>",
        "abc123",
        "1.23 M",
    ):
        assert text in words, text
    titles = {attributes["title"] for _, attributes in page.elements if attributes.get("title")}
    assert {"0.0412345", "4,884,480", "2,147,483,648 bytes", "33.400 seconds"} <= titles
    assert "--name 'it'\"'\"'s <mine>'" in page.text
    assert "is incomplete" not in words


def test_recorded_text_never_becomes_markup(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    assert page.open == [] and page.count("script") == 1
    assert page.count("img") == page.count("i") == 0
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count(HOSTILE) >= 4


def test_the_page_makes_no_request(tmp_path: Path) -> None:
    page = render_page(make_run(tmp_path / "run"))
    for _, attributes in page.elements:
        assert not {"src", "srcset", "action", "data", "style"} & set(attributes)
        target = attributes.get("href") or "#"
        assert target.startswith("#") or target == "data:,"
    policy = next(a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy and policy.startswith("default-src 'none';") and "unsafe" not in policy
    for text in page.raw.values():
        assert not re.search(r"https?://|url\(|@import|\bfetch\(|XMLHttpRequest", text)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


@pytest.mark.parametrize(
    "name", ["config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "summary.json"]
)
def test_any_one_file_may_be_missing(tmp_path: Path, name: str) -> None:
    page = render_page(make_run(tmp_path / "run", without=(name,)))
    assert page.open == []
    assert f"{name} is missing:" in page.words()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    for folder, said in ((tmp_path, "is not a run folder"), (tmp_path / "nowhere", "There is no run")):
        with pytest.raises(UserError, match=said):
            write_report(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_unreadable_files_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"name": ')
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    (tmp_path / "summary.json").write_text("[1]")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nbroken\n{"step": 2}\n')
    (tmp_path / "events.jsonl").write_text('3\n{"kind": "warning", "message": "kept"}\n{"kind": "cut')
    run = load_run(tmp_path)
    assert run.asked == {"lr": 0.1}
    assert [event["message"] for event in run.events] == ["kept"]
    assert [problem.split()[0] for problem in run.problems] == ["metrics.jsonl", "plan.json", "summary.json"]
    assert "No evaluation is recorded" in render_page(tmp_path).words()


def test_a_resumed_run_drops_the_steps_that_it_repeats(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    write_lines(
        tmp_path / "metrics.jsonl",
        [{"step": step, "loss": loss} for step, loss in ((1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (3, 2.0))],
    )
    run = load_run(tmp_path)
    assert [(row["step"], row["loss"]) for row in run.metrics] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert (run.num_repeated_steps, run.last_step) == (2, 3)


def test_a_resumed_run_warns_of_its_data_once(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    start = {"time": 1.7e9, "kind": "start", "folder": "x", "data": {"warnings": ["2 rows are equal."]}}
    write_lines(folder / "events.jsonl", [start, start])
    rows = event_rows(load_run(folder))
    assert [row["text"] for row in rows if row["kind"] == "warning"] == ["2 rows are equal."]
    assert len(rows) == 3


def test_sentences_are_joined_as_sentences() -> None:
    assert show_option(["One thing.", "Another."]).text == "One thing. Another."
    assert show_option(["q_proj", "k_proj"]).text == "q_proj, k_proj"


@pytest.mark.parametrize(
    ("change", "advised"), [({}, "--to gguf"), ({"model_type": "gpt_neox"}, "--to hf"), (None, "--to hf")]
)
def test_the_advised_export_supports_the_model(
    tmp_path: Path, change: dict[str, str] | None, advised: str
) -> None:
    folder, base = make_run(tmp_path / "run"), tmp_path / "base"
    if change is not None:
        config = json.loads((tiny_model(base) / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | change))
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"model": {"path": str(base)}}))
    summary = {"generates": True, "result": str(folder / "adapter")}
    commands = [step.command for step in use_result(summary, folder, options={})]
    assert commands[-1].endswith(advised)


def judge_files() -> Iterator[tuple[str, Any]]:
    metrics = {"metrics": {"mae": 0.5, "accuracy": 0.7}, "intervals": {"mae": [0.4, 0.6]}, "num_items": 3}
    metrics |= {"baselines": {"constant": {"metrics": {"mae": 1.0}}}, "notes": ["a note"]}
    metrics |= {"confusion": {"labels": ["1", "2"], "counts": [[2, 0], [1, 3]]}}
    metrics |= {"calibration": [{"confidence": 0.5, "accuracy": 0.5, "count": 3}]}
    yield "test_metrics.json", metrics | {"worst": [{"task": "t", "answer": "a", "expected": 1.0}]}
    yield "test_predictions.json", [{"expected": 1, "predicted": 2.0}, {"expected": 5, "predicted": 4.0}]


def test_a_damaged_judge_test_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for name, found in judge_files():
        (folder / name).write_text(json.dumps(found))
    words = render_page(folder).words()
    assert "differ from the reference scores by 0.50 points" in words and "0.400 to 0.600" in words
    for text in ("[1]", "{", '{"confusion": {"labels": ["1"], "counts": [[1, 2]]}}'):
        (folder / "test_metrics.json").write_text(text)
        assert "The section Judge is missing" in render_page(folder).words()


def test_wrong_types_never_stop_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=3)
    profile = {
        "step_s": 0.1,
        "steps": [1],
        "phases": {"forward": {"seconds": 0.1, "share": 1.0}},
        "flops": 1e9,
    }
    profile |= {"memory_timeline": [[0.0, 1e6], [0.1, 2e6]], "operators": [{"name": "mm", "seconds": 0.1}]}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "profile", "result": profile}) + "\n")
    plan = json.loads((folder / "plan.json").read_text())
    plan["data"] |= {"lengths": {"first": 0, "width": 10, "counts": [1, 2]}, "context_length": 20}
    plan["data"]["example"] = {"row": 1, "tokens": 3, "pieces": [{"text": "x", "supervised": True}]}
    whole = {"plan.json": plan, "summary.json": json.loads((folder / "summary.json").read_text())}
    lines = {
        name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    }
    other = make_run(tmp_path / "other", num_steps=3)
    for seed in range(20):
        source = random.Random(seed)
        for name, found in [*whole.items(), *judge_files()]:
            (folder / name).write_text(json.dumps(damaged(found, source)))
        for name, rows in lines.items():
            write_lines(folder / name, [damaged(row, source) for row in rows])
        assert render_page(folder).open == []
        write_comparison(compare_runs([str(folder), str(other)], parent=tmp_path), tmp_path / "page.html")
        read_listed(folder, changed=0.0)


def test_a_page_that_cannot_be_drawn_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A finished training does not end with a traceback, even for a mistake of ours."""

    def fail(*args: object, **more: object) -> str:
        raise TypeError("no such value")

    monkeypatch.setattr("crosstune.report.page.fill", fail)
    with Screen(live=False) as screen:
        assert try_report(make_run(tmp_path / "run"), screen) is None
    assert "could not be drawn" in capsys.readouterr().err


def test_nulls_are_gaps_and_a_failure_says_why(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=3)
    rows = [{"step": 1, "loss": 2.0, "lr": None}, {"step": 2, "loss": None}, {"step": 3, "loss": None}]
    write_lines(folder / "metrics.jsonl", rows)
    (folder / "summary.json").write_text(json.dumps({"status": "failed", "error": "the loss <is> gone"}))
    words = render_page(folder).words()
    assert "2 steps without a finite value" in words
    assert "last not finite lowest 2.00" in words
    assert "No finite value is recorded for: Learning rate" in words
    assert "Failed. the loss <is> gone" in words


def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", num_steps=5000)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[3333]["loss"] = 77.0
    write_lines(folder / "metrics.jsonl", rows)
    report = write_report(folder)
    assert report.stat().st_size < 400_000
    assert "highest 77.0" in Page(report.read_text(encoding="utf-8")).words()


def test_control_characters_and_lone_surrogates_are_escaped(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    answer = "\ud800 日本語 \x1b]52;c;aGk=\x07 \x9b2J \x00\u202eleft"
    write_lines(folder / "events.jsonl", [evaluation(0, "before", 1.0, 0.0, answer)])
    page = render_page(folder)
    assert "\\ud800 日本語 \\x1b]52;c;aGk=\\x07 \\x9b2J \\x00\\u202eleft" in page.text
    assert not set(write_report(folder).read_text(encoding="utf-8")) & set("\x00\x1b\x07\x9b\u202e")


@pytest.mark.parametrize(
    ("summary", "events", "status", "said"),
    [
        ({"status": "finished"}, [], "finished", ""),
        ({"status": "failed", "error": "no memory"}, [], "failed", "no memory"),
        ({"status": "stopped"}, [{"kind": "stopped", "reason": "SIGTERM"}], "stopped", "Stop button"),
        ({}, [{"kind": "failed", "error": "bad news"}], "failed", "bad news"),
        ({}, [], "unknown", "No end is recorded"),
    ],
)
def test_the_end_of_a_run(
    summary: dict[str, Any], events: list[dict[str, Any]], status: str, said: str
) -> None:
    end = end_of(RunFiles(folder=Path("run"), summary=summary, events=events))
    assert end.status == status and said in end.detail


def test_the_page_of_a_killed_run_has_the_status_of_the_list(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", without=("summary.json",))
    with run_lock.hold(folder):
        pass
    page = render_page(folder)
    assert read_listed(folder, changed=0.0).status == "killed"
    assert "✕ killed" in page.words() and "Killed. No end is recorded" in page.words()
    assert "stopped" not in page.words().lower()


def test_totals_without_a_summary() -> None:
    steps = [
        {"step": n, "loss": loss, "tokens": tokens, "supervised_tokens": tokens // 10, "step_s": 1.0}
        | {"memory_bytes": n << 30}
        for n, loss, tokens in ((1, 4.0, 100), (2, 2.0, 300))
    ]
    events = [
        {"kind": "evaluation", "step": 0, "when": "before", "metrics": {"exact_match": 0.25, "loss": 4.0}},
        {"kind": "evaluation", "step": 2, "when": "during", "metrics": {"exact_match": 0.5, "loss": 1.0}},
    ]
    run = RunFiles(folder=Path("run"), plan={"num_steps": 8}, metrics=steps, events=events)
    shown = {total.label: (total.value.text, total.detail) for total in totals(run)}
    assert shown["Steps"] == ("2", "of 8 planned") and shown["Tokens"] == ("400", "40 supervised")
    assert shown["Speed"][0] == "200 tok/s" and shown["Peak memory"][0] == "2.00 GiB"
    loss, match = evaluations(run)
    assert loss.before and loss.after and loss.change and match.change
    assert (loss.before.text, loss.after.text, loss.after_label) == ("4.00", "1.00", "at step 2")
    assert (loss.change.amount.text, loss.change.verdict) == ("−75\N{NO-BREAK SPACE}%", "better")
    assert match.change.amount.text == "+25.0 points"
    trained = training_loss(run)
    assert trained and trained.change and trained.change.amount.text == "−50\N{NO-BREAK SPACE}%"


def test_the_direction_of_a_metric_is_that_of_its_name() -> None:
    better = {"token_accuracy": 1, "shuffled_accuracy": 0, "nats_per_token": -1, "chrf": 1, "mean_length": 0}
    assert {name: display_of(name, [0.2, 0.3]).better for name in better} == better
    lower = {name for name in TITLES if display_of(name, [0.5]).better < 0}
    higher = {name for name in TITLES if display_of(name, [0.5]).better > 0}
    assert lower == {"mae", "rmse", "ece"} and lower | higher == TITLES.keys()
    assert change_between(1.0, 2.0, display_of("eval_loss", [1.0, 2.0])).verdict == "worse"
    assert change_between(0.5, 0.4, display_of("judge/accuracy", [0.5, 0.4])).verdict == "worse"
    assert change_between(2.0, 2.0, display_of("loss", [2.0])).verdict == "unchanged"
    bleu = display_of("bleu", [0.1, 30.0])
    assert [display_of(name, [1.0]).label for name in ("kl", "sft_loss", "mae")] == ["KL", "SFT loss", "MAE"]
    assert bleu.label == "BLEU" and change_between(0.1, 30.0, bleu).amount.text == "+29.9 points"


def test_of_the_metrics_of_rewards_pages_show_a_few() -> None:
    shown = {"reward": 0.5, "completions/mean_length": 9.0, "completions/clipped_ratio": 0.25}
    hidden = {
        "reward_std": 0.2,
        "completions/max_length": 12.0,
        "completions/unscored_ratio": 0.0,
        "time/generate_s": 2.0,
    }
    parts = {f"rewards/{name}/mean": 0.5 for name in ("right", "watch/short")} | {
        "rewards/watch/short/failed": 0.5
    }
    details = {"rewards/right/std": 0.1, "rewards/right/failed": 0.0}

    def names(*groups: dict[str, float]) -> set[str]:
        return set(page_metrics({name: [value] for group in groups for name, value in group.items()}))

    assert names(shown, hidden, parts, details) == {*shown, *parts}
    assert names(shown, hidden, details, {"rewards/right/mean": 0.5}) == set(shown), (
        "the only part is the reward"
    )
    other = {"loss": 1.0, "rewards/accuracies": 0.5, "time": 1.0}
    assert names(other) == set(other)


def test_a_recipe_records_a_typical_example_with_its_mask(tiny_model: Path, write_jsonl: Any) -> None:
    rows = [{"prompt": f"say {'x ' * n}", "completion": f"answer {n}"} for n in range(1, 10)]
    config = make_config(dataset=str(write_jsonl(rows)), skip_eval=True)
    described = SftRecipe(config, model_folder=tiny_model).describe()
    assert sum(described["lengths"]["counts"]) == 9
    example = masked_example(described)
    assert example is not None and example["row"] == 5
    learned = "".join(text for text, supervised in example["pieces"] if supervised)
    assert learned.startswith("answer 5") and "say" not in learned


@pytest.mark.parametrize("kept", [20, 40])
def test_the_answers_of_the_result_are_named(tmp_path: Path, kept: int) -> None:
    """With the best weights as the result, the answers after the last step are not those of the result."""
    folder = make_run(tmp_path / "run")
    events = [
        evaluation(0, "before", 3.2, 0.0, "no"),
        evaluation(20, "during", 0.5, 0.0, "better"),
        evaluation(40, "after", 0.9, 0.0, "worse"),
    ]
    write_lines(folder / "events.jsonl", events)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | {"steps": 40, "result_step": kept}))
    samples = collect_samples(load_run(folder))
    lead = lead_sample(samples)
    assert lead is not None
    titles = [column.title for column in samples.columns]
    if kept == 20:
        assert titles == ["before", "step 20 (best, the result)", "after (the last step, not the result)"]
        assert [answer.text for answer in lead.answers] == ["no", "better"]
        assert "step 20 (best, the result)" in render_page(folder).words()
    else:
        assert titles == ["before", "step 20 (best)", "after"]
        assert [answer.text for answer in lead.answers] == ["no", "worse"]
