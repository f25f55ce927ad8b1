"""Find the names that regular expressions from outside match, in bounded time."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence

from crosstune.core.errors import UserError
from crosstune.core.limited_child import run_limited

LONGEST_PATTERNS = 100_000
"""The most characters in all patterns of a request."""
_CPU_SECONDS = 2
_MEMORY_BYTES = 1 << 30


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[set[str] | str]:
    """Return for each pattern the names that it matches as a whole, or why it is not a valid pattern.

    A pattern can take time that grows exponentially with a name, so all but the plainest are matched in a child process;
    raise a UserError when that does not finish.
    """
    if sum(map(len, patterns)) > LONGEST_PATTERNS:
        raise UserError(
            f"The patterns that choose layers have more than {LONGEST_PATTERNS:,} characters.",
            do="use a shorter list or pattern",
        )
    if all(map(_is_plain, patterns)):
        return [_match(pattern, names) for pattern in patterns]
    hard = next(pattern for pattern in patterns if not _is_plain(pattern))
    answer = run_limited(
        __name__,
        json.dumps([list(patterns), list(names)]).encode(),
        what=f"The pattern {hard[:80]!r} cannot be matched with the names of layers.",
        do="simplify lora_target_modules, or target_modules in the adapter's adapter_config.json",
        cpu_seconds=_CPU_SECONDS,
        memory_bytes=_MEMORY_BYTES,
    )
    return [found if isinstance(found, str) else {names[n] for n in found} for found in json.loads(answer)]


def _is_plain(pattern: str) -> bool:
    """Return whether a pattern repeats at most two single characters, so that matching takes little time."""
    return re.search(r"[)\]}][*+?{]", pattern) is None and sum(map(pattern.count, "*+{")) <= 2


def _match(pattern: str, names: Sequence[str]) -> set[str] | str:
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return {name for name in names if expression.fullmatch(name)}


def main() -> None:
    """Answer a request of `match_names`, with places instead of names."""
    patterns, names = json.load(sys.stdin.buffer)
    answers = [_match(pattern, names) for pattern in patterns]
    places = [
        found if isinstance(found, str) else [place for place, name in enumerate(names) if name in found]
        for found in answers
    ]
    print(json.dumps(places))


if __name__ == "__main__":
    main()
