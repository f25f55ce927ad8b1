"""Items, scales, splits and verdicts of the judge recipe, and the bundled data."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data import preflight
from crosstune.data.named_datasets import BEST_SCORE, PENALTIES, VARIANTS, make_pairs, make_translations
from crosstune.data.read.sources import open_source
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.judge.examples import as_preference, find_label_tokens, soft_label
from crosstune.recipes.judge.items import Item, Scale, digit_labels, number_labels, read_scale, swapped
from crosstune.recipes.judge.open_splits import find_leaks, open_judge_data, split_groups, without_leaks
from crosstune.recipes.judge.read_items import ItemReader
from crosstune.recipes.judge.verdicts import VerdictFormat, choose_format, prompt_messages, training_messages

TEN = Scale(low=0, high=10)


def read(path: Path, **settings: Any) -> list[Item]:
    return ItemReader(**{"scale": TEN} | settings).read(open_source(str(path)))


def point(task: str = "say hi", answer: str = "hi", score: Any = 7, **more: Any) -> dict[str, Any]:
    return {"task": task, "answer": answer, "score": score, **more}


def item(number: int, *, group: str = "", score: float = 5.0, **more: Any) -> Item:
    return Item(
        id=str(number), group=group or f"g{number}", task=f"task {number}", answers=(f"answer {number}",),
        score=score, **more,
    )  # fmt: skip


# the shapes of rows


def test_the_guides_shape_is_read(write_jsonl: Any, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Rate this.\nSource: a cat\nTranslation: um gato"},
                {"role": "assistant", "content": "Score: 8/10\nIssues: none\nFeedback: Good.\nEnd."},
            ],
            "source": "a cat",
            "translation": "um gato",
        }
    ]
    path = tmp_path / "judge_train.json"
    path.write_text(json.dumps(rows))
    [found] = read(path)
    assert (found.score, found.group, found.answers, found.critique) == (8.0, "a cat", ("um gato",), "Good.")
    verdict = choose_format("auto", scale=TEN, items=[found])
    assert verdict.name == "score" and training_messages(found, verdict)[-1]["content"].endswith("End.")
    assert prompt_messages(found, verdict) == rows[0]["messages"][:1]


@pytest.mark.parametrize("suffix", [".json", ".csv"])
def test_scored_answers_in_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path, names = tmp_path / f"rows{suffix}", ["original", "translation", "mean"]
    values = [["un chat", "a cat", "91.5"], ["un chien", "a dog, big", "12"]]
    if suffix == ".csv":
        path.write_text("\n".join(",".join(f'"{v}"' for v in row) for row in [names, *values]) + "\n")
    else:
        path.write_text(json.dumps([dict(zip(names, row, strict=True)) for row in values]))
    found = read(path, scale=Scale(low=0, high=100))
    assert [one.score for one in found] == [91.5, 12.0]
    assert found[1].task == "un chien" and found[1].answers == ("a dog, big",)


def test_a_split_folder_keeps_the_scale_and_every_item(tmp_path: Path, capsys: Any) -> None:
    from crosstune.cli.main import main

    rows = [point(task=f"t {n // 2}", answer=f"answer {n}", score=1 + n % 5, z_mean=n / 7) for n in range(60)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    line = [
        "judge",
        "data",
        str(tmp_path / "rows.json"),
        "--score_scale",
        "1-5",
        "--split_to",
        str(tmp_path / "s"),
    ]
    assert main(line) == 0
    assert f"crosstune judge train --dataset {tmp_path / 's'}" in capsys.readouterr().out
    data = open_judge_data(make_config(recipe="judge", dataset=str(tmp_path / "s")))
    assert data.scale == Scale(low=1, high=5)
    found = [*data.train, *data.val, *data.test]
    assert sorted((one.task, one.answers[0], one.score, one.extra["z_mean"]) for one in found) == sorted(
        (row["task"], row["answer"], float(row["score"]), row["z_mean"]) for row in rows
    )
    again = make_config(recipe="judge", dataset=str(tmp_path / "s"), score_scale="0-10")
    with pytest.raises(UserError, match="score_scale is 1-5, but --score_scale is 0-10"):
        open_judge_data(again)
    assert main(line) == 2 and "already exists" in capsys.readouterr().err


def test_columns_are_mapped_and_unknown_ones_refused(write_jsonl: Any) -> None:
    path = write_jsonl([{"quelle": "x", "text": "y", "note": 3}])
    [found] = read(path, columns={"quelle": "task", "text": "answer", "note": "score"})
    assert (found.task, found.answers, found.score) == ("x", ("y",), 3.0)
    with pytest.raises(UserError, match="no column 'fehlt'"):
        read(path, columns={"fehlt": "score"})


def test_pairs_with_every_name_of_a_winner(write_jsonl: Any) -> None:
    winners = {"A": "A", "1": "A", "b": "B", 2: "B", "Tie": "tie", 0: "tie"}
    rows = [
        {"instruction": "i", "input": "n", "response1": "x", "response2": "y", "winner": w} for w in winners
    ]
    found = read(write_jsonl(rows))
    assert [one.winner for one in found] == list(winners.values())
    assert found[0].task == "i\n\nn" and found[0].is_pair
    assert swapped(found[0]).winner == "B" and swapped(found[0]).answers == ("y", "x")
    assert swapped(found[4]).winner == "tie"


def test_chosen_and_rejected_answers_are_pairs_in_random_order(tmp_path: Path, write_jsonl: Any) -> None:
    from crosstune.cli.main import main

    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    rows: list[dict[str, Any]] = [
        {"prompt": f"p{n}", "chosen": f"yes {n}", "rejected": "no", "margin": "0.5"} for n in range(40)
    ]
    rows += [{"chosen": turns, "rejected": [turns[0], {"role": "assistant", "content": "y"}]}]
    rows += [{"task": "t", "chosen_response": "x", "rejected_response": "x"}]
    *found, listed, same = read(path := write_jsonl(rows))
    assert {one.answers[one.winner == "B"] for one in found} == {f"yes {n}" for n in range(40)}
    assert 10 < Counter(one.winner for one in found)["A"] < 30 and found[0].margin == 0.5
    assert listed.task == "q" and set(listed.answers) == {"x", "y"} and same.winner == "tie"
    assert as_preference(listed).answers[listed.winner == "B"] == turns[1:]
    assert main(["judge", "data", str(path), "--split_to", str(tmp_path / "splits")]) == 0
    files = [tmp_path / "splits" / f"judge_{name}.json" for name in ("train", "val", "test")]
    again = [one for file in files for one in read(file)]
    kept = [
        sorted(repr((one.task, one.answers, one.winner, one.margin, one.replies)) for one in each)
        for each in (again, [*found, listed, same])
    ]
    assert kept[0] == kept[1]
    data = open_judge_data(make_config(recipe="judge", head="scalar", dataset=str(path)))
    assert len(data.train) + len(data.val) + len(data.test) == 41, "a tie teaches no reward"
    [single] = read(write_jsonl([{"messages": turns}]), labeled=False, rewards=True)
    assert single.answers == ("x",) and single.prompt == turns[:1], "not a verdict"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "p", "chosen": "x"}, "rejected answer is missing"),
        ({"prompt": "p", "chosen": "x", "rejected": "y", "margin": "much"}, "margin is not a number"),
        (point(score=11), "outside the scale 0-10"),
        (point(score=True), "not a number"),
        (point(score=None), "score is missing"),
        (point(answer=" "), "answer is missing"),
        ({"task": "t", "answer_a": "x", "answer_b": "y", "winner": "left"}, "Invalid winner: 'left'"),
        ({"task": "t", "answer_a": "x", "winner": "A"}, "answer_b is missing"),
        ({"messages": [{"role": "user", "content": "x"}]}, "does not end with"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "fine"}]},
            "no score",
        ),
    ],
)
def test_a_bad_row_is_named(write_jsonl: Any, row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        read(write_jsonl([row]))
    assert words in str(error.value) and "line 1" in str(error.value)


def test_bad_rows_are_counted_shown_after_the_report_and_skipped_on_request(
    tmp_path: Path, capsys: Any
) -> None:
    path, bad = tmp_path / "rows.jsonl", ['{"task": "t"}', "{not json", json.dumps(point(score=99))]
    path.write_text("\n".join([*(json.dumps(point(f"task {n}")) for n in range(20)), *bad]))
    words = ["judge", "data", str(path), "--show", "0"]
    assert main(words) == 2
    told = capsys.readouterr()
    assert "16 items in 16 groups" in told.out and "3 rows cannot be read" in told.out
    assert "line 21: The score is missing" in told.err
    assert main([*words, "--skip_bad_rows"]) == 0
    data = open_judge_data(make_config(recipe="judge", dataset=str(path), skip_bad_rows=True))
    assert len(data.train) + len(data.val) + len(data.test) == 20
    assert [json.loads(row)["line"] for row in data.skipped] == [21, 22, 23]
    path.write_text("\n".join(bad))
    with pytest.raises(UserError, match=r"No row of .* can be read"):
        open_judge_data(make_config(recipe="judge", dataset=str(path), skip_bad_rows=True))


def test_dedup_is_advised_where_it_has_an_effect() -> None:
    stats = {**dict.fromkeys(preflight._WARNINGS, 0), "duplicates": 2, "examples": 4, "supervised_share": 1}
    [of_judges], [of_chats] = preflight.warnings_of(stats), preflight.warnings_of(stats, num_shared=0)
    assert of_judges == "2 of 4 examples are duplicates." and "--dedup" in of_chats


def test_references_of_some_rows_only_are_refused(write_jsonl: Any) -> None:
    path = write_jsonl([point("a", reference="r"), point("b")])
    with pytest.raises(UserError, match=r"1 of 2 rows .* no reference"):
        read(path)
    assert [one.reference for one in read(path, references="optional")] == ["r", ""]
    assert [one.reference for one in read(path, references="ignore")] == ["", ""]


def test_scores_and_pairs_do_not_mix(write_jsonl: Any) -> None:
    with pytest.raises(UserError, match="mixes 1 scored answers with 1 pairs"):
        read(write_jsonl([point(), {"task": "t", "answer_a": "x", "answer_b": "y", "winner": "A"}]))


# scales and labels


@pytest.mark.parametrize(
    ("text", "low", "high"), [("0-10", 0, 10), ("1..5", 1, 5), ("-1 to 1", -1, 1), ("0-100", 0, 100)]
)
def test_scales(text: str, low: float, high: float) -> None:
    assert read_scale(text) == Scale(low=low, high=high)


@pytest.mark.parametrize("text", ["10", "5-1", "0-1e999"])
def test_bad_scales(text: str) -> None:
    with pytest.raises(UserError, match="score_scale"):
        read_scale(text)


@pytest.mark.parametrize("scale", [TEN, Scale(low=1, high=5), Scale(low=0, high=100), Scale(low=-1, high=1)])
def test_a_score_is_the_expected_value_of_its_labels(scale: Scale) -> None:
    for labels in (digit_labels(scale), number_labels(scale)):
        assert len(labels) <= 11
        for score in np.linspace(scale.low, scale.high, 37):
            spread = labels.distribution(float(score))
            assert spread.sum() == pytest.approx(1) and (spread > 0).sum() <= 2
            assert (spread * labels.values).sum() == pytest.approx(score, abs=1e-9)
            nearest, _, share = labels.neighbors(float(score))
            assert share <= 0.5 and spread[nearest] == pytest.approx(1 - share)


# verdicts


@pytest.mark.parametrize("explains", [False, True])
@pytest.mark.parametrize("name", ["digit", "score", "result", "json"])
def test_a_written_verdict_reads_back(name: str, explains: bool) -> None:
    verdict = VerdictFormat(name=name, scale=TEN, explains=explains and name != "digit")
    one = item(1, score=7.0, issues=("typo", 'bad "word"'), critique="Two errors; see above.")
    for place, label in enumerate(verdict.labels.texts):
        said = verdict.read(verdict.write(label, one))
        assert said.score == pytest.approx(verdict.labels.values[place])
        if verdict.explains:
            assert said.feedback == "Two errors; see above."
            if name != "result":
                assert said.issues == ("typo", 'bad "word"')


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("**Score:** 7/10", 7.0),
        ("Score: 7.5 / 10\nFeedback: ok", 7.5),
        ("Feedback: fine so far. [RESULT] 4", 4.0),
        ('Sure: {"score": 2, "feedback": "x"}', None),
        ('{"score": 2}', 2.0),
        ("Score: 7/10\nFeedback: not [RESULT] 3, nor Score: 2/10", 7.0),
        ("Feedback: I would not say [RESULT] 9. [RESULT] 4", 4.0),
        ('{"score": NaN}', None),
        ("Score: 11/10", None),
        ("Score: 3/5", None),
        ("", None),
    ],
)
def test_texts_that_models_write(text: str, score: float | None) -> None:
    assert VerdictFormat(name="score", scale=TEN).read(text).score == score


@pytest.mark.parametrize(
    ("text", "winner"),
    [("A", "A"), ("b.", "B"), ("tie", "tie"), ("C", "tie"), ("Winner: B\nFeedback: x", "B"), ("[RESULT] A", "A"), ("B\nFeedback: not [RESULT] A", "B"), ("Feedback: not [RESULT] A [RESULT] B", "B"),
     ('{"winner": "B"}', "B"), ("Answer A is better", "A"), ("Both are bad", None), ("", None)],
)  # fmt: skip
def test_winners_that_models_write(text: str, winner: str | None) -> None:
    assert VerdictFormat(name="winner", scale=TEN).read(text).winner == winner


def test_the_format_must_fit_the_data() -> None:
    with pytest.raises(UserError, match="does not match the data"):
        choose_format("winner", scale=TEN, items=[item(1)])
    pair = Item(id="1", group="g", task="t", answers=("x", "y"), winner="A")
    with pytest.raises(UserError, match="pairs of answers"):
        choose_format("score", scale=TEN, items=[pair])
    asked = [{"role": "user", "content": "Rate it."}]
    said = item(1, messages=asked, verdict="Score: 7/10\nFeedback: not [RESULT] 3")
    assert choose_format("auto", scale=TEN, items=[said]).name == "score"
    with pytest.raises(UserError, match="verdicts in the format score"):
        choose_format("digit", scale=TEN, items=[said])


@pytest.mark.parametrize("name", ["digit", "score", "result", "json"])
@pytest.mark.parametrize(
    "critique", ["", "fine", 'Not Score: 3/10, [RESULT] 3 or {"score": 3}; Score: 8/10.']
)
def test_a_soft_label_is_at_the_label_and_not_in_the_feedback(
    tiny_model: Path, name: str, critique: str
) -> None:
    """Whatever the feedback contains, the label is at the start of the verdict, in `result` at its end."""
    tokenizer = Tokenizer.from_folder(tiny_model)
    verdict = VerdictFormat(name=name, scale=TEN, explains=name != "digit")
    tokens = find_label_tokens(verdict, tokenizer)
    one = item(1, score=7.4, critique=critique)
    example = encode_conversation(training_messages(one, verdict), tokenizer, index=0, whole=False)
    place = tokens.place_in(example.tokens, example.supervised)
    label = verdict.write(verdict.labels.texts[verdict.label_of(one)])
    said, after = tokenizer.decode(example.tokens[:place].tolist()), example.tokens[place:].tolist()
    assert said.rstrip().endswith(verdict.before.rstrip()) and said.count("Feedback:") == (name == "result")
    assert tokenizer.decode(after).lstrip().startswith(label.removeprefix(verdict.before))
    soft = soft_label(one, example, verdict=verdict, tokens=tokens)
    assert soft is not None and place <= soft.place <= place + 1


# splits and leaks


def test_groups_stay_together_and_the_split_depends_on_the_seed_alone() -> None:
    items = [item(number, group=f"g{number // 4}") for number in range(400)]
    shares = {"val": 0.1, "test": 0.1}
    found = split_groups(items, shares=shares, seed=1)
    assert [len(found[name]) for name in ("train", "val", "test")] == [320, 40, 40]
    groups = {name: {one.group for one in rows} for name, rows in found.items()}
    assert (
        not groups["train"] & groups["val"]
        and not groups["train"] & groups["test"]
        and not groups["val"] & groups["test"]
    )
    again = split_groups(items[::-1], shares=shares, seed=1)
    assert {one.id for one in again["test"]} == {one.id for one in found["test"]}
    assert {one.id for one in split_groups(items, shares=shares, seed=2)["test"]} != {
        one.id for one in found["test"]
    }


def splits(tmp_path: Path, **rows: list[dict[str, Any]]) -> Path:
    for name, items in rows.items():
        (tmp_path / f"judge_{name}.json").write_text(json.dumps(items))
    return tmp_path


def test_the_guides_folder_has_three_splits_and_a_leak_stops_it(tmp_path: Path) -> None:
    rows = [point(f"t{number}", id=f"r{number}") for number in range(9)]
    folder = splits(tmp_path, train=rows[:5], val=rows[5:7], test=rows[7:])
    data = open_judge_data(make_config(recipe="judge", dataset=str(folder)))
    assert [len(part) for part in (data.train, data.val, data.test)] == [5, 2, 2]
    splits(tmp_path, test=[*rows[7:], point("T3 ", answer="other", id="new")])
    config = {"recipe": "judge", "dataset": str(folder)}
    with pytest.raises(UserError, match="1 of 5 training rows leak"):
        open_judge_data(make_config(**config))
    dropped = open_judge_data(make_config(**config, leaks="drop"))
    assert dropped.num_leaking == 1 and len(dropped.train) == 4
    assert len(open_judge_data(make_config(**config, leaks="allow")).train) == 5


def test_an_id_in_two_splits_is_a_leak_and_twice_in_one_an_error(tmp_path: Path) -> None:
    folder = splits(
        tmp_path,
        train=[point("a", id="x"), point("b", id="y")],
        test=[point("c", id="x"), point("d", id="z")],
    )
    with pytest.raises(UserError, match="id 'x' is also in the test split"):
        open_judge_data(make_config(recipe="judge", dataset=str(folder)))
    splits(tmp_path, test=[point("c", id="q"), point("d", id="q")])
    with pytest.raises(UserError, match="occur more than once"):
        open_judge_data(make_config(recipe="judge", dataset=str(folder)))


def test_one_file_is_split_by_group(write_jsonl: Any) -> None:
    rows = [point(f"t{number // 3}", answer=f"a{number}") for number in range(90)]
    data = open_judge_data(make_config(recipe="judge", dataset=str(write_jsonl(rows)), max_samples=10))
    assert len(data.train) == 10 and len(data.val) == 9 and len(data.test) == 9
    assert not {one.group for one in data.train} & {one.group for one in (*data.val, *data.test)}
    by_answer = make_config(recipe="judge", dataset=str(write_jsonl(rows)), group_by="nothing")
    with pytest.raises(UserError, match="group_by"):
        open_judge_data(by_answer)


# the bundled data


def test_bundled_scores_are_right_by_construction() -> None:
    rows = make_translations("train")
    assert rows == make_translations("train") and len(rows) >= 4000
    kinds = Counter(issue.split(" (")[0] for row in rows for issue in row["issues"])
    assert set(kinds) == set(PENALTIES) and min(kinds.values()) > 100
    for row in rows:
        lost = sum(PENALTIES[issue.split(" (")[0]] for issue in row["issues"])
        assert row["score"] == max(0, BEST_SCORE - lost)
        assert (row["answer"] == row["reference"]) == (not row["issues"])
    assert len({row["score"] for row in rows}) == 11


def test_bundled_splits_share_no_sentence() -> None:
    groups = {split: {row["group"] for row in make_translations(split)} for split in ("train", "val", "test")}
    assert not groups["train"] & (groups["val"] | groups["test"]) and not groups["val"] & groups["test"]
    data = open_judge_data(make_config(recipe="judge", dataset="judge_translations"))
    assert data.num_leaking == 0 and len(data.test) == 75 * len(VARIANTS)


def test_bundled_pairs_know_the_better_one() -> None:
    scores = {row["answer"]: row["score"] for row in make_translations("test")}
    rows = make_pairs("test")
    for row in rows:
        difference = scores[row["answer_a"]] - scores[row["answer_b"]]
        assert row["winner"] == ("tie" if not difference else "A" if difference > 0 else "B")
    assert {row["winner"] for row in rows} == {"A", "B", "tie"}


# data that a judge must not learn from


def test_every_kind_of_leak_is_dropped() -> None:
    """A row that leaks by its id or text is found beside one that leaks by its group."""
    train = [
        item(1, group="same"),
        replace(item(2), id="x"),
        replace(item(3), task="task 9", answers=("answer 9",)),
        item(4),
    ]
    held_out = {"test": [item(7, group="same"), replace(item(8), id="x"), item(9)]}
    assert {leak.kind for leak in find_leaks(train, held_out)} == {"group", "id", "text"}
    kept, num_leaking = without_leaks(train, held_out, policy="drop")
    assert [one.id for one in kept] == ["4"] and num_leaking == 3
    with pytest.raises(UserError, match="3 of 4 training rows leak"):
        without_leaks(train, held_out, policy="error")


@pytest.mark.parametrize("start", [0, 1])
def test_ids_that_count_the_rows_of_a_split_are_no_leak(start: int) -> None:
    def numbered(name: str, count: int, first: int) -> list[Item]:
        return [
            replace(item(n, group=f"{name}{n}"), task=f"{name} {n}", id=str(n + first)) for n in range(count)
        ]

    shuffled = [replace(one, id=str((n * 7) % 10)) for n, one in enumerate(numbered("train", 10, 0))]
    assert not find_leaks(numbered("train", 10, start), {"test": numbered("test", 5, start)})
    assert not find_leaks(shuffled, {"test": numbered("test", 5, start)}), "only one side has ids of its own"


def test_references_are_in_all_splits_or_in_none(tmp_path: Path) -> None:
    for split, more in (("train", {"reference": "r"}), ("val", {"reference": "r"}), ("test", {})):
        rows = [point(task=f"{split} {n}", answer=f"a {n}", **more) for n in range(4)]
        (tmp_path / f"judge_{split}.json").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"4 of 12 rows .* have no reference"):
        open_judge_data(make_config(recipe="judge", dataset=str(tmp_path)))
    data = open_judge_data(make_config(recipe="judge", dataset=str(tmp_path), references="ignore"))
    assert not data.train[0].reference


def test_scores_as_texts(write_jsonl: Any) -> None:
    assert read(write_jsonl([point(score=" 7.0 ")]))[0].score == 7.0
    for bad in ("7/10", "1_0", "nan", "inf", "", [7]):
        with pytest.raises(UserError):
            read(write_jsonl([point(score=bad)]))


def test_scales_that_rows_name(write_jsonl: Any) -> None:
    [found] = read(write_jsonl([point(score=80, score_scale="0-100")]))
    assert found.scale == Scale(low=0, high=100)
    for rows, words in (
        ([point(score_scale="ten")], "Invalid score_scale: 'ten'"),
        ([point(score=6, score_scale="1-5")], "outside the scale 1-5"),
        ([message("Score: 4/5")], "4 of 5, but the scale is 0-10"),
    ):
        with pytest.raises(UserError, match=words):
            read(write_jsonl(rows))
    mixed = write_jsonl([point(task="a", score_scale="1-5", score=3), point(task="b")])
    with pytest.raises(UserError, match="different scales: 0-10, 1-5"):
        open_judge_data(make_config(recipe="judge", dataset=str(mixed)))
    [found] = read(write_jsonl([message("Score: 4/5") | {"score_scale": "0-5"}]))
    assert found.score == 4


def message(verdict: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Rate."}, {"role": "assistant", "content": verdict}]}
