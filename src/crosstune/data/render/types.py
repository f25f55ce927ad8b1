"""Define what rendering a conversation needs, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.core.errors import UserError

Message = Mapping[str, Any]
Tools = Sequence[Any] | None
Span = tuple[int, int]

NO_LOSS = "no_loss"
"""Set in an assistant's turn that is part of a prompt."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ChatTokens:
    """The chat template of a model and the special tokens that it writes."""

    chat_template: str | None
    template_file: str = ""
    """The file of the template, for error messages."""
    named_tokens: tuple[tuple[str, str], ...] = ()
    """The special tokens that templates know by name: (name, text)."""
    leading_bos: str = ""
    special: tuple[str, ...] = ()
    """The texts of all special tokens."""
    stop_tokens: tuple[str, ...] = ()
    """The texts of the tokens at which the model stops, longest first."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A text and the spans of it that carry loss."""

    text: str
    spans: Sequence[Span]
    num_unlocated: int = 0
    """Number of answers that cannot be found because the template changes them; they carry no loss."""
    effective_extras: frozenset[str] = frozenset()
    """The tested extra keys that change the text."""


def template_error(template_file: str, verb: str, *, why: str) -> UserError:
    """Return the error for a template that cannot be read or rendered."""
    return UserError(
        f"The chat template {template_file or 'of this model'} cannot {verb}.",
        why=why,
        do="check the conversation, and repair or replace the template",
    )


# For models without a chat template: each turn on its own line, the end token after each answer.
PLAIN_TEMPLATE = (
    "{{ leading_bos }}{% for m in messages %}"
    "{% if m.role == 'assistant' %}Assistant: {{ m.content }}{{ eos_token }}\n"
    "{% else %}{{ m.role | capitalize }}: {{ m.content }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
