"""What the page of a run says first: the sentence, the answer, the turning points, the data, what to do next."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_report_page import evaluation, make_run, render_page

from crosstune.config.load import make_config
from crosstune.data.portrait import MOST_CHARACTERS, _cut, length_histogram
from crosstune.recipes.sft import SftRecipe
from crosstune.report.axis import log_axis
from crosstune.report.data_section import length_chart, masked_example
from crosstune.report.differences import MOST_WORDS, changed_pieces
from crosstune.report.expected import plan_against_measured
from crosstune.report.files import RunFiles, load_run
from crosstune.report.lead import lead_sample, lead_sentences
from crosstune.report.next_steps import next_steps
from crosstune.report.outcome import end_of
from crosstune.report.samples import collect_samples
from crosstune.report.turning_points import best_evaluation, parting


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


def test_the_best_evaluation_and_where_both_losses_part() -> None:
    best = best_evaluation(evaluated(OVERFITTING))
    assert best and (best.step, best.loss, best.is_last, best.overfits) == (20, 1.4, False, True)
    parted = parting(evaluated(OVERFITTING))
    assert parted and parted.step in (10, 20) and parted.evaluation == 2.0 and parted.train < 0.8


def test_losses_that_go_together_do_not_part() -> None:
    run = evaluated({0: 3.0, 20: 0.8, 40: 0.52})
    assert parting(run) is None
    best = best_evaluation(run)
    assert best and best.is_last and not best.overfits


def test_a_gap_that_closes_again_is_no_parting() -> None:
    assert parting(evaluated({10: 2.9, 20: 2.9, 40: 0.5})) is None
    assert parting(evaluated({})) is None and best_evaluation(evaluated({})) is None


def test_the_chart_marks_them_and_offers_a_logarithmic_axis(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    rows = [evaluation(step, "during", loss, 0.5, "no") for step, loss in OVERFITTING.items()]
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render_page(folder)
    words = page.words()
    assert "Best evaluation: 1.40 at step 20; the last one is 2.00." in words
    assert "training and evaluation part" in words
    marks = [a.get("class") for tag, a in page.elements if tag == "line" and a.get("class")]
    assert {"best", "parting"} <= set(marks)
    assert [tag for tag, a in page.elements if a.get("class") == "switch"] == ["input"]
    # Only one chart has the evaluated loss.
    assert "Evaluation: loss" not in words and "Evaluation: exact match" in words


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.04, 3.2], (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)),
        ([1.0, 10.0], (1.0, 2.0, 5.0, 10.0)),
        ([3.0, 9.0], (2.0, 5.0, 10.0)),
    ],
)
def test_logarithmic_axes(values: list[float], ticks: tuple[float, ...]) -> None:
    axis = log_axis(values)
    assert axis.ticks == pytest.approx(ticks)
    assert all(0 <= axis.fraction(value) <= 1 for value in values)
    assert axis.labels()[0] == f"{ticks[0]:g}"
    assert len(log_axis([1e-30, 1e30]).ticks) <= 8


def test_the_sentence_says_what_where_and_how(tmp_path: Path) -> None:
    run = load_run(make_run(tmp_path / "run"))
    said = " ".join(lead_sentences(run, end_of(run)))
    assert said.startswith(
        "Trained tiny/model with LoRA adapters on 320 examples of commands for 40 steps in 33.4 s on cpu."
    )
    assert "the loss fell from 3.21 to 0.0412 and exact match rose from 0\N{NO-BREAK SPACE}% to 95" in said


def test_the_sentence_of_a_run_without_evaluation(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", without=("events.jsonl", "summary.json"))
    words = render_page(folder).words()
    assert "Training tiny/model" in words and "for 40 of 40 steps" in words
    assert "Nothing held out was evaluated; training loss fell from 3.00 to 0.0750." in words


def test_the_sentence_names_the_weights_of_the_result() -> None:
    summary = {"status": "finished", "steps": 40, "result_step": 20}
    run = evaluated(OVERFITTING, summary=summary)
    assert "The result has the weights of step 20, the best evaluation." in lead_sentences(run, end_of(run))


def test_a_change_below_three_digits_is_not_called_a_fall() -> None:
    summary = {"status": "finished", "eval_before": {"loss": 6.2710}, "eval_after": {"loss": 6.2701}}
    run = RunFiles(folder=Path("runs/a"), summary=summary)
    assert "On held-out data the loss hardly changed from 6.27." in lead_sentences(run, end_of(run))


def sampled(*answers: str) -> RunFiles:
    moments = [("before", 0), ("during", 10), ("after", 20)]
    events = [
        {
            "kind": "evaluation",
            "when": when,
            "step": step,
            "metrics": {"loss": 3.0 - step / 10, "exact_match": 0.5},
            "samples": [
                {"prompt": "dull", "answer": "same", "reference": "x"},
                {"prompt": "good", "answer": answer, "reference": "turn it on"},
            ],
        }
        for (when, step), answer in zip(moments, answers, strict=True)
    ]
    return RunFiles(folder=Path("runs/a"), events=events)


def test_the_answer_that_became_right_opens_the_page() -> None:
    samples = collect_samples(sampled("I cannot turn it", "turn it off", "turn it on"))
    assert [column.title for column in samples.columns] == ["before", "step 10", "after, the best"]
    lead = lead_sample(samples)
    assert lead is not None and lead.prompt == "good" and lead.answers[1].mark == "match"
    assert [piece.text for piece in lead.answers[0].pieces if piece.changed] == ["I cannot "]
    assert [piece.text for piece in lead.answers[1].pieces if piece.changed] == [" on"]
    dull, good = samples.rows
    assert [answer.is_same for answer in dull.answers] == [False, True, True]
    assert [piece.text for piece in good.answers[2].pieces if piece.changed] == ["on"]


def test_differences_keep_every_character() -> None:
    text, other = "Turn off the fan, please!\n  Now.", "turn off a fan.\n  Now, please"
    pieces = changed_pieces(text, other)
    assert "".join(piece.text for piece in pieces) == text
    assert any(piece.changed for piece in pieces) and not all(piece.changed for piece in pieces)
    assert changed_pieces("same", "same") == [("same", False)]
    assert changed_pieces("", "x") == []
    long = "word " * MOST_WORDS
    assert changed_pieces(long, "other") == [(long, False)]


@pytest.mark.parametrize(
    ("losses", "status", "expected"),
    [
        (OVERFITTING, "finished", "--early_stopping"),
        ({10: 2.0, 20: 1.5, 40: 1.0}, "finished", "--resume runs/a --num_epochs 0 --max_steps 80"),
        ({}, "finished", "--eval_dataset"),
        ({10: 2.0}, "stopped", "crosstune train --resume runs/a"),
        ({10: 1.0, 20: 1.0}, "finished", "crosstune generate runs/a"),
    ],
)
def test_what_to_do_next(losses: dict[int, float], status: str, expected: str) -> None:
    summary = {"status": status, "checkpoint": "x", "result": "runs/a/adapter", "generates": True}
    run = evaluated(losses, summary=summary)
    commands = [step.command for step in next_steps(run, end_of(run))]
    assert expected in commands[0] and "crosstune compare runs/a" in commands[-1]


def test_a_run_by_epochs_is_continued_by_epochs() -> None:
    plan = {"options": {"num_epochs": 1.5, "max_steps": -1}}
    run = evaluated({20: 1.5, 40: 1.0}, summary={"status": "finished", "checkpoint": "x"}, plan=plan)
    assert next_steps(run, end_of(run))[0].command == "crosstune train --resume runs/a --num_epochs 3"


def test_a_recipe_has_commands_of_its_own() -> None:
    for recipe, expected in (("judge", "judge predict"), ("latent_diffusion", "latents decode")):
        summary = {"status": "finished", "result": "runs/a/model"}
        run = evaluated({10: 1.0, 20: 1.0}, summary=summary, plan={"options": {"recipe": recipe}})
        commands = " ".join(step.command for step in next_steps(run, end_of(run)))
        assert expected in commands and "crosstune generate" not in commands


def test_lengths_are_counted_in_round_bins() -> None:
    lengths = np.array([3, 4, 4, 9, 250])
    found = length_histogram(lengths)
    assert found == {"first": 0, "width": 20, "counts": [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]}
    assert length_histogram(np.array([7, 7])) == {"first": 7, "width": 1, "counts": [2]}
    assert "most have 0 to 19" in length_chart({"lengths": found})


@pytest.mark.parametrize("found", [{}, {"first": 1, "width": 0, "counts": [1]}, {"first": 1, "counts": "x"}])
def test_lengths_that_are_not_recorded_draw_nothing(found: dict[str, Any]) -> None:
    assert length_chart({"lengths": found}) == "" and masked_example({"example": found}) is None


def test_a_recipe_shows_a_typical_example_with_its_mask(tiny_model: Path, write_jsonl: Any) -> None:
    rows = [{"prompt": f"say {'x ' * n}", "completion": f"answer {n}"} for n in range(1, 10)]
    config = make_config(dataset=str(write_jsonl(rows)), skip_eval=True)
    described = SftRecipe(config, model_folder=tiny_model).describe()
    assert sum(described["lengths"]["counts"]) == 9
    assert described["example"]["row"] == 5
    example = masked_example(described)
    assert example is not None
    learned = "".join(piece.text for piece in example.pieces if piece.changed)
    assert learned.startswith("answer 5") and "say" not in learned


def test_the_middle_of_a_long_example_is_left_out() -> None:
    pieces = [("a" * 3 * MOST_CHARACTERS, False), ("b" * 10, True)]
    cut = _cut(pieces)
    assert cut[-1] == ("b" * 10, True) and "8,010 more characters" in cut[1][0]
    assert sum(len(text) for text, _ in cut) < MOST_CHARACTERS + 60
    assert _cut(pieces[1:]) == pieces[1:]


def test_the_plan_stands_beside_what_was_measured() -> None:
    plan = {"estimated_bytes": 2 << 30, "num_steps": 10}
    summary = {"peak_memory_bytes": 1 << 30, "steps": 10}
    rows = plan_against_measured(RunFiles(folder=Path("a"), plan=plan, summary=summary))
    assert [(row.label, row.difference) for row in rows] == [
        ("Peak memory", "−50\N{NO-BREAK SPACE}%"),
        ("Steps", "as planned"),
    ]
    assert plan_against_measured(RunFiles(folder=Path("a"))) == []


def test_control_characters_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    line = json.dumps(evaluation(0, "before", 1.0, 0.0, "\x1b[31m red \x00\u202e turned"))
    (folder / "events.jsonl").write_text(line + "\n")
    text = render_page(folder).text
    assert "\\x1b[31m red \\x00\\u202e turned" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_values_of_the_wrong_kind_do_not_stop_the_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    summary = {"status": ["finished"], "best": 7, "seconds": "x", "peak_memory_bytes": 1e-320}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = [{"step": n, "loss": 1e-320 * n, "memory_bytes": 10**30} for n in range(1, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = {"data": {"lengths": [1], "example": "x"}, "estimated_bytes": -1, "options": [], "model": []}
    (folder / "plan.json").write_text(json.dumps(plan))
    profile = {"kind": "profile", "result": {"step_s": 1, "phases": {"forward": 3}, "memory_timeline": [[1]]}}
    (folder / "events.jsonl").write_text(json.dumps(profile) + "\n")
    assert "['finished']" in render_page(folder).words()
