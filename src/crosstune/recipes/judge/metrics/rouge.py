"""Compute ROUGE-L: how much of a text follows another one in the same order."""

from __future__ import annotations

import re
from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def rouge_l(reference: str, text: str) -> float:
    """Return the F1 of the longest common subsequence of words, in lower case; 1 for two texts without words."""
    first, second = _WORD.findall(reference.lower()), _WORD.findall(text.lower())
    if not first and not second:
        return 1.0
    return 2 * _common_length(first, second) / (len(first) + len(second))


def _common_length(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence, keeping one row of the table."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return row[-1]
