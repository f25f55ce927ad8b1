"""Columns with other names, conversations in other layouts, text files, and folders of several formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.read import files
from crosstune.data.read.columns import split_by_format
from crosstune.data.read.formats import to_conversation
from crosstune.data.read.sources import open_source
from crosstune.recipes.sft import SftRecipe, check_data


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, tiny_model: Path, **options: Any) -> SftRecipe:
    return SftRecipe(make_config(dataset=str(path), **{"skip_eval": True} | options), model_folder=tiny_model)


def shown(recipe: SftRecipe, place: int = 0) -> tuple[str, str]:
    """The text of an example, and the part of it with loss."""
    example = recipe.train[place]
    return tuple(recipe.tokenizer.decode(ids) for ids in (example.tokens, example.tokens[example.supervised]))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        ({"query": "q", "reply": "r"}, ["q", "r"]),
        ({"prompt": "q", "response": "r"}, ["q", "r"]),
        ({"instruction": "q", "context": "c", "response": "r"}, ["c\n\nq", "r"]),
        ({"instruction": "q", "input": "i", "response": "r"}, ["q\n\ni", "r"]),
        ({"conversation": [{"role": "user", "content": "q"}]}, ["q"]),
        ({"Prompt": "q", "Completion": "r"}, ["q", "r"]),
        ({"Question": "q", "Answer": "r", "ID": 7}, ["q", "r"]),
        ({"QUERY": "q", "reply": "r", "ID": 7}, ["q", "r"]),
        ({"Instruction": "q", "Input": "i", "Response": "r"}, ["q\n\ni", "r"]),
        ({"System": "s", "Prompt": "q", "Response": "r"}, ["s", "q", "r"]),
        ({"Messages": [{"role": "user", "content": "q"}]}, ["q"]),
    ],
)
def test_usual_names_are_recognised(tmp_path: Path, row: dict[str, Any], texts: list[str]) -> None:
    [source] = split_by_format(open_source(str(write(tmp_path / "a.jsonl", [row]))), asked="auto", columns={})
    [found] = [found.row for _, found, _ in source.rows()]
    assert [turn["content"] for turn in to_conversation(found, source.form)] == texts


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "question": "x", "reply": "r"},
        {"problem": "q", "solution": "s", "answer": "a"},
        {"prompt": "q", "chosen": "a", "rejected": "b"},
    ],
)
def test_ambiguous_names_are_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    source = open_source(str(write(tmp_path / "a.jsonl", [row])))
    with pytest.raises(UserError, match=rf"match no known format: {', '.join(row)}") as caught:
        split_by_format(source, asked="auto", columns={})
    assert "--columns" in str(caught.value)


def test_columns_are_named_by_the_user(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"a, b": "question", "c=d": "answer", "prompt": "unused", "text": "other"}] * 2
    path = write(tmp_path / "a.jsonl", rows)
    recipe = opened(path, tiny_model, columns="a, b=prompt,c=d=completion")
    text, learned = shown(recipe)
    assert "question" in text and "unused" not in text and "answer" in learned
    described = recipe.describe()
    assert described["format"] == "prompt_completion"
    assert f"{path}: a, b as prompt, c=d as completion" in described["notes"]
    assert described["train"]["unused_columns"] == ["prompt (replaced)", "text"]
    assert opened(path, tiny_model, columns="c=d=text").describe()["format"] == "text"


def test_columns_decide_the_identity(tmp_path: Path, tiny_model: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"x": f"one {n}", "y": "two"} for n in range(3)])
    one = opened(path, tiny_model, columns="x=prompt,y=completion")
    other = opened(path, tiny_model, columns={"y": "prompt", "x": "completion"})
    assert one.identity() != other.identity()
    assert one.train.identity != other.train.identity


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ("qury=prompt,reply=completion", "no column 'qury'.*did you mean query.*query, reply"),
        ("query=promt", "cannot map query to 'promt'.*did you mean prompt"),
        ("query=prompt", "needs completion too"),
        ("query=prompt,reply=prompt", "occurs twice"),
    ],
)
def test_columns_that_make_no_sense(tmp_path: Path, tiny_model: Path, columns: str, words: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"query": "q", "reply": "r"}])
    with pytest.raises(UserError, match=f"(?s){words}"):
        opened(path, tiny_model, columns=columns)
    with pytest.raises(UserError, match=f"(?s){words}"):
        check_data(make_config(dataset=str(path), columns=columns), model_folder=None)


def test_an_optional_column_may_be_missing_in_the_first_row(tmp_path: Path, tiny_model: Path) -> None:
    rows = [{"q": "one", "r": "a"}, {"q": "two", "r": "b", "told": "be brief"}]
    path = write(tmp_path / "a.jsonl", rows)
    recipe = opened(path, tiny_model, columns="q=prompt,r=completion,told=system")
    assert "be brief" in shown(recipe, 1)[0]


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize(
    "names", [("human", "gpt"), ("User", "Assistant"), ("user", "bot"), ("HUMAN", "model")]
)
def test_roles_and_keys_of_other_tools(column: str, names: tuple[str, str]) -> None:
    form = "messages" if column == "messages" else "sharegpt"
    turns = [
        {"from": names[0], "value": "q"},
        {"role": names[1], "content": "r"},
        {"role": names[0], "value": "s", "content": None},
        {"from": names[1], "content": "t"},
    ]
    found = to_conversation({column: turns}, form)
    assert [turn["role"] for turn in found] == ["user", "assistant"] * 2
    assert [turn["content"] for turn in found] == list("qrst")


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}U:{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.mark.parametrize("template", [None, MARKED])
def test_only_the_completion_of_a_conversation_is_learned(
    tmp_path: Path, tiny_model: Path, template: str | None
) -> None:
    history = [("user", "first"), ("assistant", "earlier"), ("user", "second")]
    prompt = [{"role": role, "content": content} for role, content in history]
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "completion": [{"role": "assistant", "content": "later"}]},
        {"prompt": prompt, "completion": "later"},
        {"prompt": "second", "completion": [{"role": "assistant", "content": "later"}]},
        {"prompt": json.dumps(prompt), "completion": "later"},
        {"prompt": "[1, 2] is a list", "completion": "later"},
    ]
    options = {}
    if template is not None:
        (tmp_path / "t.jinja").write_text(template)
        options["chat_template"] = str(tmp_path / "t.jinja")
    recipe = opened(write(tmp_path / "a.jsonl", rows), tiny_model, **options)
    for place in range(len(rows)):
        text, learned = shown(recipe, place)
        assert "later" in learned and "earlier" not in learned
        assert ("earlier" in text) == (place in (0, 1, 3))
    assert "[1, 2] is a list" in shown(recipe, 4)[0]


def test_a_completion_needs_an_answer() -> None:
    turns = [{"role": "user", "content": "q"}]
    with pytest.raises(UserError, match="no assistant message"):
        to_conversation({"prompt": turns, "completion": turns}, "prompt_completion")


def test_a_text_file_is_split_at_the_context(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "book.txt"
    text = "\n\n".join(f"Paragraph {n} of the book about the sea." for n in range(60))
    path.write_bytes(text.replace("\n", "\r\n").encode())
    recipe = opened(path, tiny_model, context_length=64)
    whole = opened(path, tiny_model, context_length=2048)
    assert len(whole.train) == 1 and whole.train.pieces is None
    tokens, pieces = whole.train[0].tokens, list(recipe.train)
    assert recipe.tokenizer.decode(tokens.tolist()) == text
    assert len(pieces) > 10 and max(len(piece.tokens) for piece in pieces) == 64
    joined = np.concatenate([pieces[0].tokens, *(piece.tokens[1:] for piece in pieces[1:])])
    np.testing.assert_array_equal(joined, tokens)
    assert recipe.train.num_supervised.sum() == len(tokens) - 1, "every token but the first is predicted once"
    assert recipe.train.stats["cut_examples"] == recipe.train.stats["duplicates"] == 0
    assert any("split into" in note for note in recipe.describe()["notes"])
    held = opened(path, tiny_model, context_length=64, skip_eval=False)
    assert held.held_out is not None
    assert len(held.held_out) + len(held.train) == len(pieces)
    assert "warnings" not in held.describe()


def test_other_texts_are_split_when_asked(tmp_path: Path, tiny_model: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "word " * 200}, {"text": "short"}])
    with pytest.raises(UserError, match="--truncation cut, drop or split"):
        opened(path, tiny_model, context_length=64)
    recipe = opened(path, tiny_model, context_length=64, truncation="split")
    assert recipe.train.rows().tolist() == [0] * (len(recipe.train) - 1) + [1]
    chats = write(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "word " * 200}])
    with pytest.raises(UserError, match="--truncation cut or drop"):
        opened(chats, tiny_model, context_length=64, truncation="split")


def test_a_large_text_file_is_several_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "TEXT_CHARACTERS", 100)
    path = tmp_path / "a.txt"
    paragraphs = [f"{n} " + "word " * 12 for n in range(9)]
    path.write_text("\n\n".join(paragraphs) + "\n")
    texts = [found.row["text"] for _, found, _ in open_source(str(path)).rows()]
    assert 2 < len(texts) < 9
    assert "\n\n".join(texts).split("\n\n") == paragraphs


def test_a_folder_may_hold_several_formats(tmp_path: Path, tiny_model: Path) -> None:
    write(tmp_path / "a_train.jsonl", [{"input": f"a{n}", "output": "x"} for n in range(3)])
    write(tmp_path / "b.jsonl", [{"question": f"b{n}", "answer": "y"} for n in range(3)])
    (tmp_path / "c.txt").write_text("plain text")
    (tmp_path / "README.txt").write_text("about the data")
    write(tmp_path / "my_val.jsonl", [{"prompt": "v", "response": "z"}])
    write(tmp_path / "judge_test.json", [{"prompt": "t", "response": "z"}])
    recipe = opened(tmp_path, tiny_model, skip_eval=False)
    text = "\n".join(shown(recipe, place)[0] for place in range(len(recipe.train)))
    assert len(recipe.train) == 7 and "plain text" in text and "about the data" not in text
    assert recipe.train.form == "prompt_completion, question_answer, text"
    assert recipe.held_out is not None and [q.text for q in recipe.questions] == ["v"]
    assert any("not read: judge_test.json" in note for note in recipe.describe()["notes"])
    assert recipe.train.rows().tolist() == list(range(7))


def test_a_folder_of_held_out_files_can_be_evaluated_on(tmp_path: Path, tiny_model: Path) -> None:
    write(tmp_path / "held" / "judge_test.json", [{"prompt": "t", "response": "z"}])
    data = write(tmp_path / "a.jsonl", [{"prompt": "v", "completion": "z"}] * 3)
    recipe = opened(data, tiny_model, skip_eval=False, eval_dataset=str(tmp_path / "held"))
    assert [q.text for q in recipe.questions] == ["t"]
    with pytest.raises(UserError, match="contains no training data"):
        opened(tmp_path / "held", tiny_model)


def test_quotes_in_a_tsv_that_was_never_quoted_are_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text('prompt\tcompletion\n"so" said he\tthe "term"\n"whole"\t"a\n')
    rows = [found.row for found in files.file_part(path).rows()]
    assert rows[0] == {"prompt": '"so" said he', "completion": 'the "term"'}
    assert rows[1] == {"prompt": '"whole"', "completion": '"a'}
    path.write_text('prompt\tcompletion\n"a\ttab"\t"a ""quote"""\n')
    assert [found.row for found in files.file_part(path).rows()] == [
        {"prompt": "a\ttab", "completion": 'a "quote"'}
    ]
