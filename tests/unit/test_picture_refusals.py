"""Whatever reads text only refuses pictures by name, in columns and in messages; none is left out in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.data.read.formats import to_conversation
from crosstune.recipes.preference.read_pairs import read_answer, read_preferences
from crosstune.recipes.rl.read_prompts import read_prompt
from crosstune.results.prompt_file import read_prompts

PARTS = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}]
ANSWERS = {"completion": "red", "chosen": "red", "rejected": "blue", "answer": "red"}
READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "text": lambda row: to_conversation(row, "prompt_completion"),
    "pairs": lambda row: read_preferences(row, paired=True),
    "answers": lambda row: read_answer({"prompt": row["prompt"], **{k: v for k, v in row.items() if k in ("completion", "images", "image")}}),
    "prompts": read_prompt,
}  # fmt: skip


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "<image>What is it?", "images": ["a.png"]},
        {"prompt": "<image>What is it?", "image": {"bytes": b"x"}},
        {"prompt": [{"role": "user", "content": PARTS}]},
    ],
)
def test_readers_of_text(reader: str, asked: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        READERS[reader](asked | ANSWERS)
    assert "text only" in (caught.value.why or "") and "vision-language" in (caught.value.do or "")


@pytest.mark.parametrize("reader", READERS)
def test_an_empty_column_is_no_picture(reader: str) -> None:
    assert READERS[reader]({"prompt": "What is it?", "images": [], "image": None} | ANSWERS)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "<image>What is it?", "images": ["a.png"]},
        {"messages": [{"role": "user", "content": PARTS}]},
        {"prompt": [{"role": "user", "content": PARTS}]},
    ],
)
def test_prompts_of_generate(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "What?"}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(UserError, match="line 2 has a picture") as caught:
        read_prompts(path, say=print)
    assert caught.value.why and caught.value.do
