"""Try a tokenizer.json in a child process with limits on time and memory, once for each content."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.limited_child import run_limited
from crosstune.core.user_paths import cache_base

_TRIAL = 1
"""Increase when the trial changes, so that every tokenizer is tried again."""
_CPU_SECONDS = 10
_MEMORY_BYTES = 4 << 30
_LENGTH = 3000
"""The length of a trial text, as long as a usual row: a pattern that needs quadratic time on it is too slow."""


def try_tokenizer(raw: bytes, *, path: Path, cache: Path | None) -> None:
    """Raise a UserError unless the tokenizer loads and encodes a few long texts in time. What passed is remembered by its
    hash in crosstune's cache folder, which is `cache` or the user's."""
    passed = _verdict(hashlib.sha256(raw).hexdigest(), cache)
    if passed is not None and passed.is_file():
        return
    run_limited(
        __name__,
        raw,
        what=f"{path} cannot be used.",
        do="download or copy the file again, or use another tokenizer",
        cpu_seconds=_CPU_SECONDS,
        memory_bytes=_MEMORY_BYTES,
    )
    if passed is not None:
        with contextlib.suppress(OSError):  # without a cache, it is tried again next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def _verdict(digest: str, cache: Path | None) -> Path | None:
    try:
        return cache_base(cache) / "tokenizers" / f"{digest}-{_TRIAL}"
    except UserError:  # no home folder
        return None


def trial_texts() -> list[str]:
    """Return texts on which patterns are slow: long runs of one kind of character, and what follows them."""
    words = "The quick brown fox, 12 times; isn't it?\n\tNaïve café — 東京タワー 🙂 "
    runs = [
        (run * _LENGTH)[:_LENGTH]
        for run in ("a", "A", " ", "1", "\n", "!", "_", "ab ", "é", "東", "'s", "aA1 ")
    ]
    return [(words * _LENGTH)[:_LENGTH], *runs, *(f"{run}{end}" for run in runs for end in ("!", "a", "1"))]


def main() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
    for text in trial_texts():
        tokenizer.decode(tokenizer.encode(text).ids)


if __name__ == "__main__":
    main()
