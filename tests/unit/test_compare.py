"""Comparisons of runs: differences, best values, and runs that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_runs import HOSTILE, Page, make_run

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.report import outcome
from crosstune.report.charts import overlay_charts
from crosstune.report.comparison import Comparison, Row, compare_runs, shared_prompts, write_comparison
from crosstune.report.files import load_run
from crosstune.report.formatting import show_number
from crosstune.report.run_list import read_listed
from crosstune.report.samples import Answer, compare_answers

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: the same but for the learning rate, the last without evaluation and of another recipe."""
    parent = tmp_path_factory.mktemp("compared") / "runs"
    parent.mkdir()
    for number, name in enumerate(("one", "two", "three")):
        folder = make_run(parent / name, num_steps=20 + number)
        plan, summary = json.loads((folder / "plan.json").read_text()), {}
        plan["options"] |= {"lr": 0.001 * (number + 1), "recipe": "judge" if name == "three" else "sft"}
        plan["name"] = name
        (folder / "plan.json").write_text(json.dumps(plan))
        if name == "three":
            (folder / "events.jsonl").write_text("")
            summary = {"status": "stopped", "steps": 22}
            (folder / "summary.json").write_text(json.dumps(summary))
    return parent


@pytest.fixture(scope="module")
def compared(runs: Path) -> Comparison:
    return compare_runs(["one", "two"], parent=runs)


def test_options_and_results_that_differ(compared: Comparison) -> None:
    options = {row.label: [cell.text for cell in row.cells] for row in compared.options}
    assert options["lr"] == ["0.001", "0.002"] and "lora_rank" not in options and "name" not in options
    assert options["planned steps"] == ["20", "21"]
    results = {row.label: row for row in compared.results}
    assert [cell.text for cell in results["steps"].cells] == ["20", "21"]
    assert results["training loss of the last step"].best == 1
    assert results["speed"].best is None  # the same
    assert results["last evaluation: exact match"].cells[0].text == "95\N{NO-BREAK SPACE}%"
    assert compared.notes == []


def test_values_that_a_resume_changed_and_values_that_are_not_set(runs: Path, tmp_path: Path) -> None:
    changed = ["lr: 0.0002 in the checkpoint, 0.0001 now", "wd: 0.01 in the checkpoint, 0.02 now"]
    resumed = {"kind": "resumed", "step": 5, "changed_options": changed}
    for name, model, options in (
        ("a", "x", {"num_epochs": 0, "max_steps": 9}),
        ("b", "y", {"max_steps": -1}),
    ):
        folder = make_run(tmp_path / name, num_steps=5)
        plan = json.loads((folder / "plan.json").read_text())
        plan["options"] |= {"lr": 0.0001, "wd": 0.02, "num_epochs": 1, **options}
        plan["model"] = {"identity": {"sha256": model}}
        (folder / "plan.json").write_text(json.dumps(plan))
        summary = json.loads((folder / "summary.json").read_text()) | {"tokens_per_s": 5.0 + len(options)}
        (folder / "summary.json").write_text(json.dumps(summary))
        with (folder / "events.jsonl").open("a") as events:
            events.write(json.dumps(resumed) + "\n" if name == "a" else "")
    found = compare_runs(["a", "b"], parent=tmp_path)
    options = {row.label: [cell.text for cell in row.cells] for row in found.options}
    assert options["lr"] == ["0.0002 then 0.0001", "0.0001"] and options["wd"] == ["0.01 then 0.02", "0.02"]
    assert options["num_epochs"] == ["not set", "1"] and options["max_steps"] == ["9", "not set"]
    speed = next(row for row in found.results if row.label == "speed")
    assert speed.best is None, "of different models"


def test_runs_of_different_recipes_and_without_metrics(runs: Path) -> None:
    found = compare_runs(["one", str(runs / "three")], parent=runs)
    assert any("the recipes differ (sft, judge)" in note for note in found.notes)
    results = {row.label: row for row in found.results}
    assert [cell.text for cell in results["best evaluation loss"].cells] == ["0.0412", "–"]
    assert results["best evaluation loss"].best is None
    titles = {chart.title: len(chart.series) for chart in overlay_charts(found.runs, found.names)}
    assert (titles["Training loss, smoothed"], titles["Evaluation loss"]) == (2, 1)
    assert shared_prompts(found) == []


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([], "There is nothing to compare"),
        (["one"], "There is only one run to compare"),
        (["one", "one"], "There is only one run to compare"),
        (["one", "too"], "There is no run"),
    ],
)
def test_what_cannot_be_compared(runs: Path, targets: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        compare_runs(targets, parent=runs)
    assert "two" in caught.value.do


def test_losses_of_different_things_have_no_best(runs: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", num_steps=22)
    plan = json.loads((other / "plan.json").read_text())
    (other / "plan.json").write_text(json.dumps(plan | {"data": {"identity": "of other data"}}))
    (other / "events.jsonl").write_text("")
    found = {row.label: row for row in compare_runs(["one", str(other)], parent=runs).results}
    assert found["training loss of the last step"].best is None
    alike = {row.label: row for row in compare_runs(["one", "two"], parent=runs).results}
    assert alike["training loss of the last step"].best is not None


def test_the_list_the_page_and_the_comparison_show_the_same_training_loss(runs: Path) -> None:
    shown = [cell.text for cell in _row_named(compare_runs(["one", "two"], parent=runs)).cells]
    for name, text in zip(("one", "two"), shown, strict=True):
        loss = outcome.training_loss(load_run(runs / name))
        assert loss is not None and loss.after is not None and loss.after.text == text
        summary = runs / name / "summary.json"
        final = {"final_loss": load_run(runs / name).metrics[-1]["loss"]}  # as `train` records it
        summary.write_text(json.dumps(json.loads(summary.read_text()) | final))
        listed = read_listed(runs / name, changed=0.0)
        assert listed.loss is not None and show_number(listed.loss).text == text


def test_a_lower_training_loss_is_not_better_in_a_run_that_overfits(runs: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other")
    rows = [
        {"kind": "evaluation", "when": "during", "step": step, "metrics": {"loss": 9.0}} for step in (10, 20)
    ]
    (other / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _row_named(compare_runs(["two", str(other)], parent=runs)).best is None
    loss = outcome.training_loss(load_run(other))
    assert loss is not None and loss.change is not None and loss.change.verdict == ""


def test_values_that_look_equal_have_no_best(runs: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", num_steps=20)
    for loss, best in ((0.15000001, None), (0.2, 0)):
        with (other / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 20, "loss": loss}) + "\n")
        assert _row_named(compare_runs(["one", str(other)], parent=runs)).best == best


def test_a_shorter_time_is_better_only_for_as_many_tokens(runs: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", num_steps=20)
    summary = json.loads((other / "summary.json").read_text())
    for tokens, best in ((summary["tokens"], 1), (summary["tokens"] // 2, None)):
        changed = {"seconds": summary["seconds"] / 2, "tokens": tokens}
        (other / "summary.json").write_text(json.dumps(summary | changed))
        assert _row_named(compare_runs(["one", str(other)], parent=runs), "time").best == best


def test_an_answer_is_compared_with_earlier_runs_only() -> None:
    absent, same_in_its_run = Answer(text=None), Answer(text="a b", is_same=True)
    _, second, third = compare_answers([absent, same_in_its_run, Answer(text="a b")])
    assert not second.is_same and not any(piece.changed for piece in second.pieces)
    assert third.is_same


def _row_named(found: Comparison, label: str = "training loss of the last step") -> Row:
    return next(row for row in found.results if row.label == label)


def test_the_page_escapes_everything(compared: Comparison, tmp_path: Path) -> None:
    page = Page(write_comparison(compared, tmp_path / "page.html").read_text(encoding="utf-8"))
    assert page.open == [] and page.count("script") == 1 and HOSTILE in page.text
    assert page.count("img") == page.count("i") == 0


def test_the_command_writes_the_page(runs: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "page.html"
    assert main(["compare", "one", "two", "--output_dir", str(runs), "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["options"]["lr"] == {"one": "0.001", "two": "0.002"} and report["page"] == str(out)
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["compare", "one", "two", "--output_dir", str(runs), "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and "a folder" in said and "Errno" not in said and "do:" in said
