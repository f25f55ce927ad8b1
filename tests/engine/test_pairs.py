"""`crosstune pairs` on a tiny model: pairs by a function and by both kinds of judges, their check, and bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import crosstune
from crosstune.cli.main import main
from crosstune.recipes.preference.read_pairs import read_preferences

Captured = pytest.CaptureFixture[str]
PROMPTS = [{"prompt": f"[{n}] Say {n}."} for n in range(5)] + [
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
]
FUNCTIONS = """
from dataclasses import dataclass


@dataclass
class Weight:
    value: "float" = 1.0


print("imported")

def short(prompt, answer):
    print("scored", len(answer))  # not into the JSON of the command
    return -len(answer) * Weight().value

def full(*, messages, answer, reference=None, **rest):
    assert messages[-1]["content"] == rest["prompt"] and reference is None
    return len(messages)

def says(answer):
    return {"good": 2.0, "fine": 1.0, "odd": 1.0, "bad": 0.0}[answer]

def fails(prompt, answer):
    return 1 / 0

def text(prompt, answer):
    return "high"

def nan(prompt, answer):
    return float("nan")

def other(question):
    return 1

number = 3
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "judges.py").write_text(FUNCTIONS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return folder


@pytest.fixture(scope="module", params=["score", "winner"])
def judge(request: pytest.FixtureRequest, tiny_model: Path, home: Path) -> Path:
    """A judge of single answers, or of two."""
    rows: list[dict[str, Any]] = [
        {"task": f"t{n}", "answer": "a good text" if n % 2 else "a bad text", "score": 10 * (n % 2)}
        for n in range(30)
    ]
    if request.param == "winner":
        rows = [{"task": f"t{n}", "answer_a": "good", "answer_b": "bad", "winner": "A"} for n in range(30)]
    data = home / f"{request.param}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = crosstune.train(
        recipe="judge", model_name=str(tiny_model), dataset=str(data), max_steps=2, backend="cpu", precision="fp32",
        skip_eval=True, output_dir=str(home), name=request.param, progress=False,
    )  # fmt: skip
    return run.folder


def words(home: Path, model: Path, judge: object, out: Path, *more: str) -> list[str]:
    asked = ["pairs", "make", str(model), "--prompts", str(home / "prompts.jsonl"), "--judge", str(judge)]
    return [*asked, "--max_new_tokens", "6", "--backend", "cpu", "--out", str(out), *more]


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_function_chooses_and_the_recipe_reads_the_rows(
    tiny_model: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    out, short = tmp_path / "pairs.jsonl", f"{home}/judges.py:short"
    assert main(words(home, tiny_model, short, out, "--json")) == 0
    found, rows = json.loads(capsys.readouterr().out), read(out)
    assert (
        found["num_pairs"] == len(rows) == 6
        and 20 <= found["num_cut"] <= 24
        and [*tmp_path.iterdir()] == [out]
    )
    for row, asked in zip(rows, PROMPTS, strict=True):
        [pair] = read_preferences(row, paired=True)
        assert pair.prompt[-1]["content"] == asked.get("prompt", "Hello")
        chosen, rejected = (answer[0]["content"] for answer in pair.answers)
        assert (row["score_chosen"], row["score_rejected"]) == (-len(chosen), -len(rejected))
        assert len(chosen) < len(rejected) and (row["model"], row["judge"]) == (str(tiny_model), short)
    assert found["mean_chosen"] == sum(row["score_chosen"] for row in rows) / 6
    # The answers to a prompt do not depend on the other prompts.
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS[:3:-1]))
    assert main(words(tmp_path, tiny_model, short, tmp_path / "b.jsonl")) == 0
    assert read(tmp_path / "b.jsonl") == rows[:3:-1]
    assert main(words(home, tiny_model, short, tmp_path / "c.jsonl", "--seed", "1")) == 0
    assert read(tmp_path / "c.jsonl") != rows
    margins = sorted(row["score_chosen"] - row["score_rejected"] for row in rows)
    capsys.readouterr()
    assert main(words(home, tiny_model, short, out, "--overwrite", "--margin", str(margins[-1]))) == 0
    said = capsys.readouterr().out
    kept = [row for row in rows if row["score_chosen"] - row["score_rejected"] >= margins[-1]]
    assert (
        read(out) == kept and f"{6 - len(kept)} prompts: equal scores, or a difference below --margin" in said
    )
    assert f"{found['num_cut']} of 24 answers end at --max_new_tokens" in said and f"--dataset {out}" in said


def test_without_a_pair_the_answers_are_kept_for_another_judge(
    tiny_model: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "pairs.jsonl"
    assert main(words(home, tiny_model, f"{home}/judges.py:full", out)) == 2
    assert "6 with equal scores" in (said := capsys.readouterr().err) and "do:" in said and not out.exists()
    assert main(words(home, tiny_model, f"{home}/judges.py:short", out)) == 0
    said = capsys.readouterr().err
    assert "continues after 6 finished rows" in said and "keeps the rows of a different request" in said
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
    assert len(read(out)) == 6


def test_a_trained_judge_scores_as_predict_does_and_checks_the_pairs(
    judge: Path, tiny_model: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    out, items = tmp_path / "pairs.jsonl", tmp_path / "items.jsonl"
    assert main(words(home, tiny_model, judge, out, "--num", "2")) == 0
    rows = [row for row in read(out) if len(row["prompt"]) == 1]
    sides = [
        (row["prompt"][0]["content"], *(row[side][0]["content"] for side in ("chosen", "rejected")))
        for row in rows
    ]
    tests = [{"task": task, "answer_a": a, "answer_b": b} for task, a, b in sides]
    if judge.name == "score":
        tests = [{"task": task, "answer": answer} for task, *both in sides for answer in both]
    items.write_text("".join(json.dumps(row) + "\n" for row in tests))
    predict = ["judge", "predict", str(judge), "--input", str(items), "--output", str(tmp_path / "v.jsonl")]
    assert main([*predict, "--backend", "cpu"]) == 0
    found = read(tmp_path / "v.jsonl")
    if judge.name == "score":
        expected = [one["predicted"] for one in found]
        scores = [row[f"score_{side}"] for row in rows for side in ("chosen", "rejected")]
        assert scores == pytest.approx(expected, abs=1e-3)
    else:
        rates = [a + tie / 2 for a, _, tie in (one["probabilities"] for one in found)]
        assert [row["score_chosen"] for row in rows] == pytest.approx(rates, abs=1e-3)
        assert all(row["score_chosen"] + row["score_rejected"] == pytest.approx(1) for row in rows)
        assert main(words(home, tiny_model, judge, tmp_path / "x.jsonl", "--margin", "2")) == 2
        assert "differ by at most 1" in capsys.readouterr().err
    capsys.readouterr()
    check = ["pairs", "check", str(out), "--judge", str(judge), "--backend", "cpu"]
    assert main([*check, "--out", str(tmp_path / "checked.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "100.0%" in said and f"{len(read(out))} pairs were made with this judge" in said
    assert {row["second_judge"] for row in read(tmp_path / "checked.jsonl")} == {"chosen"}


def test_the_figures_of_a_check_are_those_of_a_hand_computation(
    home: Path, tmp_path: Path, capsys: Captured
) -> None:
    sides = [("good", "bad")] * 7 + [("bad", "good")] * 2 + [("fine", "odd")]
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"p{n}", "chosen": a, "rejected": b, "score_chosen": 9 - n, "score_rejected": 0}
        for n, (a, b) in enumerate(sides)
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = ["pairs", "check", str(pairs), "--judge", f"{home}/judges.py:says"]
    assert main([*check, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[f"num_{name}"] for name in ("pairs", "chosen", "rejected", "tie", "unscored")] == [
        10,
        7,
        2,
        1,
        0,
    ]
    # Wilson: the fractions p with |7/9 - p| = z * sqrt(p (1 - p) / 9).
    assert found["agreement"] == 7 / 9
    for bound in found["interval"]:
        assert abs(7 / 9 - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / 9))
    assert found["interval"][0] < 7 / 9 < found["interval"][1]
    buckets = [(each["from"], each["to"], each["num_chosen"], each["num_pairs"]) for each in found["buckets"]]
    assert buckets == [(0, 1, 0, 2), (2, 4, 2, 3), (5, 6, 2, 2), (7, 9, 3, 3)]
    assert main(check) == 0
    said = capsys.readouterr().out
    assert "77.8% [45.3%, 93.7%]" in said and "no evidence that the judge agrees" in said
    for worse, verdict in ((False, "the judge agrees"), (True, "the judge prefers the rejected")):
        sides = [("bad", "good") if worse else ("good", "bad")] * 8
        pairs.write_text(
            "".join(json.dumps({"prompt": "p", "chosen": a, "rejected": b}) + "\n" for a, b in sides)
        )
        assert main(check) == 0
        assert verdict in capsys.readouterr().out


BAD = {
    "--judge {home}/judges.py:fails": "failed for prompt 1 ('[0] Say 0.')",
    "--judge {home}/judges.py:text": "it returned 'high', which is not a finite number",
    "--judge {home}/judges.py:nan": "it returned nan",
    "--judge {home}/judges.py:shrt": "has no function shrt",
    "--judge {home}/judges.py:number": "has no function number",
    "--judge {home}/judges.py:other": "it needs question, but is called by name with prompt, answer",
    "--judge {home}/none.py:short": "There is no file",
    "--judge no_such_module:short": "No module named 'no_such_module'",
    "--judge {model}": "is not a judge",
    "--judge {home}/none": "none",
    "--num 1": "at least 2",
    "--margin -1": "at least 0",
    "--temperature 0": "all answers to a prompt would be the same",
    "--prompts {home}/empty.txt": "has no prompts",
    "--prompts {home}/none.txt": "none.txt",
    "--max_new_tokens 100000": "6 prompts are too long for this model: prompt 1 ('[0] Say 0.')",
    "--out {home}/prompts.jsonl": "is the input",
    "--out {home}/judges.py": "already exists",
}


@pytest.mark.parametrize("asked", BAD)
def test_bad_input_is_one_sentence_before_the_work(
    asked: str, tiny_model: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    (home / "empty.txt").write_text("\n")
    more = asked.format(home=home, model=tiny_model).split()
    assert main(words(home, tiny_model, f"{home}/judges.py:short", tmp_path / "pairs.jsonl", *more)) == 2
    said = capsys.readouterr().err
    assert BAD[asked] in said and "do:" in said and "Traceback" not in said, said
    assert not list(tmp_path.iterdir())
    if asked.endswith(":fails"):
        line = FUNCTIONS.partition("1 / 0")[0].count("\n") + 1
        assert "ZeroDivisionError" in said and f"judges.py, line {line}" in said


@pytest.mark.parametrize("status", ["unfinished", "other recipe"])
def test_a_run_that_is_no_finished_judge_is_rejected(
    status: str, tiny_model: Path, home: Path, tmp_path: Path, capsys: Captured
) -> None:
    recipe = "judge" if status == "unfinished" else "sft"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(json.dumps({"options": {"recipe": recipe}, "method": "lora"}))
    assert main(words(home, tiny_model, tmp_path / "run", tmp_path / "pairs.jsonl")) == 2
    said = capsys.readouterr().err
    assert ("neither an adapter nor a model" if recipe == "judge" else "did not train a judge") in said


def test_a_check_names_the_row_that_is_no_pair(home: Path, tmp_path: Path, capsys: Captured) -> None:
    pairs = tmp_path / "pairs.jsonl"
    for text, why in (
        ('{"prompt": "p", "chosen": "a"}\n', "pairs.jsonl, line 1: The rejected answer"),
        ('{"prompt": "p", "completion": "a", "label": true}\n', "do:  a row has prompt, chosen and rejected"),
        ("", "no pairs"),
    ):
        pairs.write_text(text)
        assert main(["pairs", "check", str(pairs), "--judge", f"{home}/judges.py:short"]) == 2
        said = capsys.readouterr().err
        assert why in said and "--preference_loss" not in said
    assert main(["pairs", "check", str(pairs), "--judge", f"{home}/judges.py:short", "--num", "3"]) == 2
    assert "--num is for make" in capsys.readouterr().err
