"""Preferences are read from common layouts; an error gives the line and the reason of a bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.preference.open_pairs import open_preferences, tokenize
from crosstune.recipes.preference.read_pairs import read_preferences

USER = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello!", "No."))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Hello!", "rejected": "No."},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "\n\nHuman: Hi\n\nAssistant: No."},
        {"prompt": "\n\nHuman: Hi\n\nAssistant:", "chosen": "Hello!", "rejected": "No."},
        {"instruction": "Hi", "input": "", "chosen": "Hello!", "rejected": "No."},
        {"instruction": "Hi", "chosen_response": "Hello!", "rejected_response": "No."},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Hello!"},
            "rejected": {"from": "gpt", "value": "No."},
        },
        {"prompt": json.dumps([USER]), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
    ],
)
def test_pairs(row: dict[str, Any]) -> None:
    [found] = read_preferences(row, paired=True)
    assert list(found.prompt) == [USER]
    assert [list(answer) for answer in found.answers] == [[GOOD], [BAD]]


def test_a_system_prompt_and_tools() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {"system": "Be kind.", "prompt": "Hi", "chosen": "Hello!", "rejected": "No.", "tools": tools}
    [found] = read_preferences(row, paired=True)
    assert found.prompt[0] == {"role": "system", "content": "Be kind."} and found.tools == tools


def test_earlier_answers_of_a_conversation_carry_no_loss(tiny_model: Path) -> None:
    earlier = [USER, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Bye"}]
    [found] = read_preferences({"chosen": [*earlier, GOOD], "rejected": [*earlier, BAD]}, paired=True)
    assert list(found.prompt) == earlier
    system = {"role": "system", "content": "Be kind."}
    [with_system] = read_preferences(
        {"chosen": [system, *earlier, GOOD], "rejected": [system, *earlier, BAD]}, paired=True
    )
    assert list(with_system.prompt) == [system, *earlier]
    excluded = {**GOOD, "content": "Well.", "weight": 0}
    [partly] = read_preferences(
        {"prompt": [USER], "chosen": [excluded, USER, GOOD], "rejected": [BAD]}, paired=True
    )
    config = make_config(recipe="preference", context_length=256)
    tokenizer = Tokenizer.from_folder(tiny_model)
    for one, first in ((found, "Hello!"), (with_system, "Hello!"), (partly, "Hello!")):
        corpus = tokenize([one], tokenizer, config=config, name="pairs", model_limit=None).corpus
        supervised = [tokenizer.decode(corpus[n].tokens[corpus[n].supervised].tolist()) for n in (0, 1)]
        assert [text.replace("<|im_end|>", "").strip() for text in supervised] == [first, "No."]


@pytest.mark.parametrize(
    ("label", "meaning"), [(True, True), ("false", False), (1, True), (0.0, False), ("1", True)]
)
def test_labels(label: Any, meaning: bool) -> None:
    for row in (
        {"prompt": "Hi", "completion": "Hello!", "label": label},
        {"messages": [USER, GOOD], "kto_tag": label},
    ):
        [found] = read_preferences(row, paired=False)
        assert found.is_desirable is meaning and list(found.answers[0]) == [GOOD]


def test_a_pair_is_two_labelled_answers_for_kto() -> None:
    found = read_preferences({"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}, paired=False)
    assert [one.is_desirable for one in found] == [True, False]


@pytest.mark.parametrize(
    ("row", "paired", "said"),
    [
        ({"prompt": "Hi", "chosen": "Hello!"}, True, "rejected answer is missing"),
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": ""}, True, "rejected answer is missing"),
        ({"prompt": "Hi", "chosen": "Hello!", "rejected": "  "}, True, "answer is empty"),
        ({"prompt": "Hi", "chosen": 3, "rejected": "No."}, True, "must be text"),
        ({"chosen": "Hello!", "rejected": "No."}, True, "no prompt"),
        ({"prompt": "Hi", "completion": "Hello!", "label": True}, True, "not a pair"),
        ({"prompt": "Hi", "completion": "Hello!"}, False, "no label"),
        ({"prompt": "Hi", "completion": "Hello!", "label": "good"}, False, "label is"),
        ({"prompt": "Hi", "completion": "Hello!", "label": 0.5}, False, "label is"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, True, "are the same"),
    ],
)
def test_a_bad_row(row: dict[str, Any], paired: bool, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_preferences(row, paired=paired)


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rows_of_one_prompt_are_not_split(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {number // 4}", "chosen": f"yes {number}", "rejected": "no"}
        for number in range(80)
    ]
    data = open_preferences(make_config(recipe="preference", dataset=write(tmp_path, rows)), paired=True)
    asked = [{one.prompt[0]["content"] for one in part} for part in (data.train, data.held_out)]
    assert len(data.held_out) == 8 and len(data.train) == 72 and not asked[0] & asked[1]


def test_bad_rows_are_located_or_skipped(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b"}]
    name = write(tmp_path, rows)
    with pytest.raises(UserError, match=r"rows.jsonl.*2.*rejected answer is missing"):
        open_preferences(make_config(recipe="preference", dataset=name), paired=True)
    data = open_preferences(make_config(recipe="preference", dataset=name, skip_bad_rows=True), paired=True)
    assert len(data.train) == 1 and len(data.skipped) == 1


def test_one_class_only(tmp_path: Path) -> None:
    rows = [{"prompt": str(number), "completion": "b", "label": True} for number in range(5)]
    with pytest.raises(UserError, match=r"Every answer .* is desirable"):
        open_preferences(make_config(recipe="preference", dataset=write(tmp_path, rows)), paired=False)


def test_equal_answers_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "b", "rejected": "b"}]
    data = open_preferences(make_config(recipe="preference", dataset=write(tmp_path, rows)), paired=True)
    assert len(data.train) == 1 and data.num_left_out == 1
    with pytest.raises(UserError, match="no preference to learn from"):
        open_preferences(make_config(recipe="preference", dataset=write(tmp_path, rows[1:])), paired=True)


def report(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any], str]:
    """Run `crosstune data` with a tiny model; return its exit code, report and errors."""
    code = main(["data", *words, "--recipe", "preference", "--model_name", "tiny-random", "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out), printed.err


def test_the_data_command_accounts_for_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Question {n}", "chosen": "yes, and much more", "rejected": "no"} for n in range(25)]
    turned = {"prompt": "Question 0", "chosen": "no", "rejected": "yes, and much more"}
    same, bad = {"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b"}
    long = {"prompt": "Question x", "chosen": "w " * 60, "rejected": "no"}
    name = write(tmp_path, [*rows, rows[0], turned, same, bad, long])
    code, found, err = report(capsys, name, "--skip_eval", "--context_length", "64")
    assert code == 2 and "line 29: The rejected answer is missing." in err
    assert found["rows"] == {
        "read": 30, "trained": 28, "held_out": 0, "same": 1, "too_long": 0, "bad": 1, "unused": 0
    }  # fmt: skip
    assert found["sides"]["chosen"]["answers"] == 28 and found["sides"]["chosen"]["longest"] > 30
    assert "[[yes, and much more<|im_end|>]]" in found["shown"][0] and "rejected: " in found["shown"][0]
    said = " ".join(found["warnings"])
    for part in (
        "1 of 30 rows are left out", "they cannot be read", "1 of 28 rows repeat", "both orders: 1",
        "chosen answer is longer in 96%",
    ):  # fmt: skip
        assert part in said
    assert found["stops_at_long"] and "cut at the context" not in said, "training stops instead"
    cutting = ["--skip_eval", "--context_length", "64", "--truncation", "cut"]
    _, found, _ = report(capsys, name, *cutting)
    assert "cut at the context: 1" in " ".join(found["warnings"])
    assert "or compare with --preference_loss simpo" in said
    _, found, _ = report(capsys, name, "--skip_eval", "--preference_loss", "ipo")
    assert any(one.endswith("length; balance the lengths of the pairs") for one in found["warnings"])
    code, found, _ = report(
        capsys, name, "--skip_eval", "--context_length", "64", "--truncation", "drop", "--skip_bad_rows"
    )
    assert code == 0 and found["rows"]["too_long"] == 1 and found["rows"]["trained"] == 27
    assert found["train"]["dropped_examples"] == 1 and found["train"]["examples"] == 54
    [said] = [one for one in found["warnings"] if "context" in one or "skipped" in one]
    assert said == "1 of 30 rows are left out: an answer does not fit the context"
    assert main([
        "data", name, "--recipe", "preference", "--model_name", "tiny-random", "--context_length", "64", "--skip_bad_rows",
        "--truncation", "error",
    ]) == 2  # fmt: skip
    error = capsys.readouterr().err
    assert "1 of 29 rows of" in error or "1 of 26 rows of" in error
    assert "rows.jsonl, line 30, has" in error and "--truncation cut or drop" in error


def test_answers_with_labels_from_pairs_are_counted_by_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": f"Question {n}", "chosen": "yes " * (1 + 60 * (n == 3)), "rejected": "no"}
        for n in range(20)
    ]
    name = write(tmp_path, rows)
    words = ["--preference_loss", "kto", "--context_length", "64"]
    code, found, err = report(capsys, name, *words, "--skip_eval")
    assert code == 2 and "1 of 20 rows of" in err and "rows.jsonl, line 4, has" in err
    code, found, _ = report(capsys, name, *words, "--truncation", "drop")
    assert code == 0 and found["rows"]["too_long"] == 0, "its other answer is trained"
    assert "one answer that does not fit the context and is left out: 1" in " ".join(found["warnings"])
    assert f"rows held out, with all rows of their prompts: {found['rows']['held_out']}" in found["notes"]


def test_the_data_command_names_every_bad_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"Question {n}", "chosen": "yes", "rejected": "no"} for n in range(24)
    ]
    for place in range(1, 14):
        rows[place]["chosen"] = None
    rows[14]["prompt"], rows[15]["prompt"] = None, " "
    del rows[16]["prompt"]
    code, found, err = report(capsys, write(tmp_path, rows), "--skip_eval")
    assert code == 2 and found["rows"]["bad"] == 16 and found["rows"]["trained"] == 8
    assert (
        "rows.jsonl, lines 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 2 more: The chosen answer is missing." in err
    )
    for line, why in (
        (15, "its column prompt is null"),
        (16, "its column prompt is empty"),
        (17, "there is no column prompt"),
    ):
        assert f"rows.jsonl, line {line}: The row has no prompt: {why}" in err
    assert err.rstrip().splitlines()[-2].endswith("rows.jsonl, line 2: The chosen answer is missing.")


def test_the_data_command_reads_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": f"Question {n}", "completion": "yes", "label": n % 2 == 0} for n in range(10)]
    name = write(tmp_path, [*rows, {**rows[0], "label": False}])
    leaked = tmp_path / "held.jsonl"
    leaked.write_text(json.dumps(rows[1]) + "\n")
    code, found, _ = report(capsys, name, "--preference_loss", "kto", "--eval_dataset", str(leaked))
    assert code == 0 and found["rows"]["trained"] == 11 and found["rows"]["held_out"] == 1
    assert {side: each["answers"] for side, each in found["sides"].items()} == {
        "desirable": 5,
        "undesirable": 6,
    }
    said = " ".join(found["warnings"])
    assert "both labels: 1" in said and "1 of 1 held-out prompts are also in the training data" in said
    assert found["shown"][0].startswith("desirable: ")
