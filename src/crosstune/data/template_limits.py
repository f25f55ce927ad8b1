"""Define the limits of rendering: CPU time, memory and length of the text, in proportion to the conversation."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_TEMPLATE = 256 << 10
"""In characters; templates of published models have a few thousand, the longest about 30,000."""


class OverLimit(Exception):
    """A template exceeded a limit."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of rendering. All of them grow with the conversation, so that long ones can be rendered."""

    cpu_s: float = 5.0
    """CPU time of one row, so that a busy machine does not fail a template."""
    memory_bytes: int = 512 << 20
    """Memory of the process beyond what it has at its start."""
    stalled_s: float = 300.0
    """The longest time in which the process may use no CPU at all."""

    def row_cpu_s(self, *, characters: int, num_messages: int) -> float:
        # The answers of a row are located by rendering the conversation up to each of them.
        return self.cpu_s + characters * (1 + num_messages) / 2e6

    def batch_memory_bytes(self, request_bytes: int) -> int:
        return self.memory_bytes + 64 * request_bytes


def most_characters(*, input_characters: int, template_characters: int) -> int:
    """Return the limit for the text of one rendering."""
    return (64 << 10) + 16 * input_characters + 4 * template_characters
