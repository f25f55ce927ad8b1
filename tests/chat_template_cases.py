"""Chat templates in the form of those in use, with `{% generation %}` marks, and conversations for them.

The templates were written for these tests. What they write for a conversation follows the published templates, and the
marks are where TRL puts them in its copies for training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Case:
    title: str
    headers: tuple[str, ...] = ()
    """The part of the generation prompt that a marked answer begins with."""
    tail: str = ""
    """White space inside the marks, after the end token."""
    stops: tuple[str, ...] = ()
    """Tokens besides EOS at which the model stops."""


CASES = {
    "llama3": Case("Llama 3"),
    "llama3_1": Case("Llama 3.1, 3.2, 3.3"),
    "llama2": Case("Llama 2"),
    "mistral": Case("Mistral"),
    "qwen2_5": Case("Qwen2.5, ChatML", headers=("\n",), tail="\n"),
    "qwen3": Case("Qwen3", headers=("<|im_start|>assistant\n",), tail="\n"),
    "glm4_moe": Case("GLM-4-MoE (4.5, 4.6)", stops=("<|user|>", "<|observation|>")),
    "gpt_oss": Case("gpt-oss", headers=("<|start|>assistant",)),
    "nemotron3_nano": Case("Nemotron 3 Nano", tail="\n"),
    "gemma": Case("Gemma", tail="\n"),
    "phi3": Case("Phi-3", tail="\n"),
    "phi4": Case("Phi-4"),
    "cohere": Case("Cohere Command, Aya", headers=("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",)),
    "deepseek_r1": Case("DeepSeek-V3, R1", headers=("<｜Assistant｜>", "<｜tool▁outputs▁end｜>")),
    "smollm2": Case("SmolLM2", tail="\n"),
    "smollm3": Case("SmolLM3", headers=("<|im_start|>assistant\n",), tail="\n"),
    "zephyr": Case("Zephyr, TinyLlama"),
    "granite": Case("Granite", tail="\n"),
}
SPECIAL = sorted({token for path in FOLDER.glob("*.jinja") for token in re.findall(
    r"<\|\w+\|>|<｜[\w▁]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]", path.read_text(encoding="utf-8")
)} | {"<s>", "</s>"})  # fmt: skip


def marked_source(name: str) -> str:
    separate = FOLDER / f"{name}.marked.jinja"
    return (separate if separate.exists() else FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def plain_source(name: str) -> str:
    """Return the template without marks, as models have it."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return re.sub(r"\bgeneration\b", "if true", re.sub(r"\bendgeneration\b", "endif", source))


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "id": "a1", "function": {"name": "weather", "arguments": arguments}}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Das Wetter für <b>einen</b> Ort & Tag.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief, für 日本."}
FOUND = {"role": "tool", "content": '{"sky": "grün & <blue>"}', "tool_call_id": "a1", "name": "weather"}
IN_TEXT = "<think>\nhm, {0}\n</think>\n\nIt is {0}."

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Größe? 日本語"), answer("Fünf 🙂 Meter.")],
    "with a system turn": [SYSTEM, user("one?"), answer("eins")],
    "several turns": [SYSTEM, user("one?"), answer("eins"), user("two?"), answer("zwei\nzwei"), user("3?"), answer("drei")],
    "the answer is the question": [user("eins"), answer("eins"), user("assistant\neins"), answer("assistant\neins")],
    "white space around": [user("  one? "), answer("\n\n eins \n"), user("\ntwo"), answer(" zwei\n")],
    "consecutive answers": [user("one?"), answer("eins"), answer("zwei"), user("two?"), answer("drei"), answer("vier")],
    "a last question": [user("one?"), answer("eins"), user("two?")],
    "consecutive questions": [user("one?"), user("two?"), answer("eins")],
    "reasoning": [user("one?"), answer("eins", reasoning_content="hm\nhm")],
    "reasoning under thinking": [user("one?"), answer("eins", thinking="hm\nhm")],
    "reasoning under reasoning": [user("one?"), answer("eins", reasoning="hm\nhm")],
    "reasoning in each turn": [user("one?"), answer("eins", thinking="hm 1"), user("two?"), answer("zwei", thinking="hm 2")],
    "reasoning in the text": [user("one?"), answer(IN_TEXT.format(1)), user("two?"), answer(IN_TEXT.format(2))],
    "reasoning, then none": [user("one?"), answer("eins", reasoning="hm"), user("two?"), answer("zwei")],
    "reasoning of consecutive answers": [user("one?"), answer("eins", reasoning="a"), answer("zwei", reasoning="b")],
    "no thinking": [{"role": "system", "content": "/no_think"}, user("one?"), answer("eins"), user("two?"), answer("zwei")],
    "a tool is called": [user("Sky?"), answer("", tool_calls=call(city="Köln", day=1)), FOUND, answer("Blue."), user("ok?"), answer("Yes.")],
    "a tool is called last": [user("Sky?"), answer("", tool_calls=call(city="Köln"))],
    "a tool is called with content": [user("Sky?"), answer("I look.", tool_calls=call(city="Köln")), FOUND, answer("Blue.")],
    "a tool is called with content last": [user("Sky?"), answer("I look.", tool_calls=call(city="<Köln>"))],
    "a tool is called with reasoning": [SYSTEM, user("Sky?"), answer("", thinking="look", tool_calls=call(city="Köln")), FOUND, answer("Blue.", thinking="so")],
    "a tool is called twice": [user("Sky?"), answer("", tool_calls=call(city="Köln")), FOUND, answer("", tool_calls=call(city="Ulm")), FOUND, answer("Both.")],
    "two answers of tools": [user("Sky?"), answer("", tool_calls=call(city="Köln")), FOUND, FOUND, answer("Blue.")],
}  # fmt: skip
