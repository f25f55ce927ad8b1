"""Check the words of a command line before anything reads them."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.core.errors import UserError, shown


def check_words(words: Sequence[str]) -> None:
    """Raise a UserError for a word that is not text: bytes that are not UTF-8, or a NUL character."""
    for place, word in enumerate(words):
        is_text = not any(0xD800 <= ord(char) <= 0xDFFF for char in word)
        if is_text and "\0" not in word:
            continue
        before = words[place - 1] if place else ""
        name = word.partition("=")[0] if word.startswith("--") else before if before.startswith("--") else ""
        raise UserError(
            f"{name or 'an argument'} cannot be {shown(word.removeprefix(name).removeprefix('='))}.",
            why="it holds a NUL character." if is_text else "it is not text in UTF-8.",
            do="rename the file if it is the name of one",
        )
