"""Define the inputs and the result of rendering a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
Tools = Sequence[Any] | None
Span = tuple[int, int]

NO_LOSS = "no_loss"
"""Set in an assistant's turn without loss: True if it is part of a prompt, or `EXCLUDED`."""
EXCLUDED = "excluded"
"""The data excludes the turn; it carries no loss even with --train_on_prompt."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""The names under which datasets store an answer's reasoning; most templates read the first."""
PLAIN_TEMPLATE = (
    "{{ leading_bos }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models without a chat template: a line for each turn, the end token after each answer."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A rendered text and its supervised spans."""

    text: str
    spans: Sequence[Span]
    first_answer: int = 0
    """The place where the first answer with loss begins."""
    num_unlocated: int = 0
    """Answers that cannot be found because the template changes them; they carry no loss."""
    prompt_ends: Sequence[int] = ()
    """End positions of the prompts before the answers."""
    lacks_reasoning: bool = False
    """The generation prompt opens the reasoning, and no answer begins with it."""
    pictures: Sequence[Any] = ()
    """The pictures of the conversation, in order."""
    effective_extras: frozenset[str] = frozenset()
    """The tested extra keys that change the text."""
