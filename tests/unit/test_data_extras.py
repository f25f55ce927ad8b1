"""Parts of rows in addition to roles and contents: tools, calls, reasoning, a system prompt in a separate column."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.data.read.formats import to_conversation, unused_columns
from crosstune.recipes.sft import SftRecipe

TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
ROW: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "Is it warm in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look."},
        {"role": "tool", "content": "21", "name": "weather", "tool_call_id": None},
        {"role": "assistant", "content": "It is."},
    ],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "source": "made up",
}


@pytest.fixture
def calling_model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def read(model: Path, data: Path) -> SftRecipe:
    return SftRecipe(make_config(dataset=str(data), skip_eval=True), model_folder=model)


def supervised(recipe: SftRecipe) -> str:
    example = recipe.train[0]
    return recipe.tokenizer.decode(example.tokens[example.supervised], keep_special=True)


def test_calls_tools_and_reasoning_reach_the_template(calling_model: Path, write_jsonl: Any) -> None:
    recipe = read(calling_model, write_jsonl([ROW]))
    whole = recipe.tokenizer.decode(recipe.train[0].tokens, keep_special=True)
    assert json.dumps(ROW["tools"][0]) in whole
    call = f"<call>{json.dumps(CALL['function'])}</call>"
    assert supervised(recipe) == f"<think>I look.</think>\n{call}<|im_end|>It is.<|im_end|>"
    warnings = recipe.describe()["warnings"]
    assert "columns that are not read: source." in warnings
    # `name` is in the row, and this template does not write it.
    assert [w for w in warnings if "ignores name:" in w]


def test_calls_are_located_where_a_template_rewrites_earlier_turns(
    calling_model: Path, write_jsonl: Any
) -> None:
    """Reasoning only in the last answer, so that the text up to an earlier one is not a beginning of the whole."""
    template = TEMPLATE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
    (calling_model / "chat_template.jinja").write_text(template)
    call = f"<call>{json.dumps(CALL['function'])}</call>"
    assert supervised(read(calling_model, write_jsonl([ROW]))) == f"{call}<|im_end|>It is.<|im_end|>"


@pytest.mark.parametrize(
    ("row", "form"),
    [
        ({"system": "Be brief.", "instruction": "a", "output": "b"}, "alpaca"),
        ({"system_prompt": "Be brief.", "question": "a", "answer": "b"}, "question_answer"),
        (
            {
                "system": "Be brief.",
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            },
            "sharegpt",
        ),
    ],
)
def test_a_system_column_is_the_first_turn(row: dict[str, Any], form: str) -> None:
    turns = [(turn["role"], turn["content"]) for turn in to_conversation(row, form) if isinstance(turn, dict)]
    assert turns == [("system", "Be brief."), ("user", "a"), ("assistant", "b")]
    assert unused_columns(row | {"id": 3, "input": "", "images": []}, form) == {"id"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b", "image": "photo.png"}, "not text: image"),
        ({"prompt": "a", "completion": "b \ud800"}, "unpaired surrogate"),
        ({"prompt": "a", "completion": "b", "tools": {"name": "x"}}, "tools column must contain a list"),
    ],
)
def test_a_fault_in_a_later_row_is_named(
    tiny_model: Path, write_jsonl: Any, row: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read(tiny_model, write_jsonl([{"prompt": "a", "completion": "b"}, row]))
    assert "line 2" in caught.value.message


@pytest.fixture
def bare_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Without a chat template and without an end token."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_model_without_a_template_is_told_of_and_gets_one(bare_model: Path, write_jsonl: Any) -> None:
    row = {"prompt": "Is it warm?", "completion": "It is."}
    recipe = read(bare_model, write_jsonl([row]))
    words = " ".join(recipe.describe()["warnings"])
    assert "lacks a chat template" in words
    assert "no end token" in words
    recipe.complete_result(bare_model)
    again = read(bare_model, write_jsonl([row]))
    assert "lacks a chat template" not in " ".join(again.describe()["warnings"])
    assert again.train[0].tokens.tolist() == recipe.train[0].tokens.tolist()


@pytest.mark.parametrize("key", ["reasoning", "thinking"])
def test_reasoning_under_another_name_is_trained_and_not_reported(
    calling_model: Path, write_jsonl: Any, key: str
) -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Yes.", key: "[1] Hm."}]
    both = [turns[0], {**turns[1], "reasoning_content": "[1] Hm."}]
    recipe = read(calling_model, write_jsonl([{"messages": turns}, {"messages": both}]))
    assert supervised(recipe) == "<think>[1] Hm.</think>\nYes.<|im_end|>"
    assert recipe.describe()["train"]["ignored_by_template"] == []
