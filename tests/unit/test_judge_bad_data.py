"""Data that a judge must not learn from: leaks of every kind, missing references, scores as texts, every script."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.sources import open_source
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.open_splits import open_judge_data
from crosstune.recipes.judge.prompts import prompt_messages
from crosstune.recipes.judge.read_items import ItemReader
from crosstune.recipes.judge.scale import Scale
from crosstune.recipes.judge.splits import find_leaks, without_leaks
from crosstune.recipes.judge.verdicts import choose_format

TEN = Scale(low=0, high=10)


def read(path: Path) -> list[Item]:
    return ItemReader(scale=TEN).read(open_source(str(path)))


def point(task: str = "say hi", answer: str = "hi", score: Any = 7, **more: Any) -> dict[str, Any]:
    return {"task": task, "answer": answer, "score": score, **more}


def item(number: int, *, group: str = "") -> Item:
    texts: dict[str, Any] = {"task": f"task {number}", "answers": (f"answer {number}",)}
    return Item(id=str(number), group=group or f"g{number}", score=5.0, **texts)


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


@pytest.mark.parametrize("text", ["7", " 7.0 ", "7e0"])
def test_scores_as_texts(write_jsonl: Any, text: str) -> None:
    assert read(write_jsonl([point(score=text)]))[0].score == 7.0
    for bad in ("7/10", "1_0", "nan", "inf", "", "seven", [7], {"v": 7}):
        with pytest.raises(UserError):
            read(write_jsonl([point(score=bad)]))


def test_texts_of_every_script_are_kept(write_jsonl: Any) -> None:
    said = "Ünïcödé 你好 שלום \u202e 👩‍👩‍👧 \x00 ﷽"
    [found] = read(write_jsonl([point(task=said, answer=said, reference=said)]))
    assert (found.task, found.answers, found.reference) == (said, (said,), said)
    verdict = choose_format("auto", scale=TEN, items=[found])
    assert said in prompt_messages(found, verdict)[0]["content"]


def test_scales_that_rows_name(write_jsonl: Any) -> None:
    [found] = read(write_jsonl([point(score=80, score_scale="0-100")]))
    assert found.scale == Scale(low=0, high=100)
    for rows, words in (
        ([point(score_scale="ten")], "Its score_scale is 'ten'"),
        ([point(score=6, score_scale="1-5")], "outside the scale 1-5"),
        ([message("Score: 4/5")], "4 of 5, and the scale is 0-10"),
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
