"""Find the words in which one text differs from another, for highlighting."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import NamedTuple

MOST_WORDS = 600
"""Longer texts are not compared: the time grows with the product of their lengths."""
_WORDS = re.compile(r"\s+|\w+|[^\w\s]")


class Piece(NamedTuple):
    text: str
    changed: bool


def changed_pieces(text: str, other: str) -> list[Piece]:
    """Return a text in pieces, each with whether the other text lacks it. A text too long to compare is one piece."""
    words, others = _WORDS.findall(text), _WORDS.findall(other)
    if not text:
        return []
    if max(len(words), len(others)) > MOST_WORDS:
        return [Piece(text, False)]
    matches = SequenceMatcher(a=others, b=words, autojunk=False).get_opcodes()
    pieces = [
        Piece("".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matches
        if stop > start
    ]
    return _joined(pieces)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join changed pieces that only a space or a sign separates, as single letters in colour are hard to read."""
    found = list[Piece]()
    for place, piece in enumerate(pieces):
        between = 0 < place < len(pieces) - 1 and not piece.changed and not re.search(r"\w", piece.text)
        changed = piece.changed or (between and pieces[place - 1].changed and pieces[place + 1].changed)
        if found and found[-1].changed == changed:
            found[-1] = Piece(found[-1].text + piece.text, changed)
        else:
            found.append(Piece(piece.text, changed))
    return found
