"""Try a tokenizer.json or a chat template: the program of the child process that `tokenizer.py` starts with limits."""

from __future__ import annotations

import sys
from typing import Any

from crosstune.core.errors import UserError

_LENGTH = 3000
"""Characters of a trial text, as in a usual row: a pattern that needs quadratic time on it is too slow."""


def trial_texts() -> list[str]:
    """Return strings on which patterns are slow: long runs of one kind of character, with and without a different end."""
    words = "The quick brown fox, 12 times; isn't it?\n\tNaïve café — 東京タワー 🙂 "
    runs = [
        (run * _LENGTH)[:_LENGTH]
        for run in ("a", "A", " ", "1", "\n", "!", "_", "ab ", "é", "東", "'s", "aA1 ")
    ]
    return [(words * _LENGTH)[:_LENGTH], *runs, *(f"{run}{end}" for run in runs for end in ("!", "a", "1"))]


def _encode_texts(raw: bytes) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(raw)
    for text in trial_texts():
        tokenizer.decode(tokenizer.encode(text).ids)


def _render_conversations(raw: bytes) -> None:
    """Render short and long conversations. A template may reject some of them; reading the data reports that."""
    from crosstune.data.render.answer_spans import render_text
    from crosstune.data.render.types import Message
    from crosstune.data.tokens.tokenizer import Tokenizer

    turns: list[Message] = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "It is 4."},
    ]
    tool = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {}}}
    without: Any = {"rust": None, "bos_token": None, "eos_token": None, "pad_id": 0, "stop_ids": frozenset()}
    tokenizer = Tokenizer(chat_template=raw.decode("utf-8"), **without)
    for messages in (turns[:1], turns, turns * 20, [{"role": "system", "content": "Be brief."}, *turns]):
        for tools in (None, [tool]):
            try:
                render_text(messages, tokenizer, add_generation_prompt=len(messages) == 1, tools=tools)
            except UserError as error:
                if isinstance(error.__cause__, MemoryError):
                    sys.exit("it needs too much memory.")


def main() -> None:
    kind, _, raw = sys.stdin.buffer.read().partition(b"\n")
    (_encode_texts if kind == b"tokenizers" else _render_conversations)(raw)


if __name__ == "__main__":
    main()
