"""Files of prompts and answers, and the conversation of a chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from crosstune.core.errors import ConfigError, UserError
from crosstune.core.sampling import Sampling
from crosstune.results.prompt_file import Conversation, json_line, read_prompts


def test_a_text_file_has_a_prompt_per_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text(
        'First?\n\n  {"prompt": "taken as it is"}  \r\nDritte\N{INVERTED QUESTION MARK}', encoding="utf-8"
    )
    said: list[str] = []
    prompts = read_prompts(path, system="Be brief.", say=said.append)
    assert said == [f"skipped 1 empty line of {path}"]
    assert [prompt.text for prompt in prompts] == ["First?", '{"prompt": "taken as it is"}', "Dritte¿"]
    assert [prompt.line for prompt in prompts] == [1, 3, 4]
    assert prompts[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "First?"},
    ]
    assert prompts[0].row("Yes.") == {"prompt": "First?", "answer": "Yes."}


def test_json_lines_hold_prompts_or_conversations(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"prompt": "p"},
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "known"}]},
        {"messages": turns},
        {"prompt": turns},
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    one, two, three, four = read_prompts(path, system="mine", say=print)
    assert one.text == "p"
    assert two.messages == [{"role": "system", "content": "mine"}, {"role": "user", "content": "q"}]
    assert two.row("a") == {"messages": two.messages, "answer": "a", "reference": "known"}
    assert three.messages == four.messages == turns


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no prompts"),
        ("{", "line 1 is not JSON"),
        ('{"question": 1}', "line 1 has no prompt"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 1: The roles"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no user message"),
        ('{"prompt": "fine"}\n{"messages": "x"}', "line 2"),
    ],
)
def test_a_bad_row_is_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_prompts(path, say=print)
    assert caught.value.do


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        read_prompts(tmp_path / "none.txt", say=print)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match="Cannot read"):
        read_prompts(tmp_path / "binary.txt", say=print)
    assert json_line({"answer": "ä"}) == '{"answer": "ä"}\n'.encode()


def test_a_conversation_is_saved_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    chat = Conversation(system="Be brief.")
    with pytest.raises(UserError, match="nothing to save"):
        chat.save(path)
    chat.add("q", "a")
    chat.save(path)
    with pytest.raises(UserError, match="exists"):
        chat.save(path)
    other = Conversation()
    other.load(path)
    assert other == chat
    other.reset()
    assert other.messages() == [{"role": "system", "content": "Be brief."}]
    for bad in ("", "{}", "[]", '{"messages": 3}', '{"messages": [{"role": "wizard"}]}'):
        path.write_text(bad)
        with pytest.raises(UserError):
            other.load(path)


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": float("nan")},
        {"temperature": 1e-30},
        {"top_p": 1.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"seed": 2**63},
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting)) + "|problem"):
        Sampling(**setting)
