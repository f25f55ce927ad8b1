"""Find the names that regular expressions from outside match."""

from __future__ import annotations

import re
from collections.abc import Sequence

from crosstune.core.errors import UserError

LONGEST_PATTERNS = 100_000
"""The most characters in all patterns of a request."""
_NESTED_REPETITION = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[set[str] | str]:
    """Return for each pattern the names that it matches as a whole, or why it is not a valid pattern."""
    if sum(map(len, patterns)) > LONGEST_PATTERNS:
        raise UserError(
            f"The patterns that choose layers have more than {LONGEST_PATTERNS:,} characters.",
            do="use a shorter list or pattern",
        )
    for pattern in patterns:
        if _NESTED_REPETITION.search(pattern):
            raise UserError(
                f"The pattern {pattern[:80]!r} cannot be matched with the names of layers.",
                why="it repeats a group that has a repetition inside, which can take exponential time.",
                do="simplify lora_target_modules, or target_modules in the adapter's adapter_config.json",
            )
    return [_match(pattern, names) for pattern in patterns]


def _match(pattern: str, names: Sequence[str]) -> set[str] | str:
    try:
        expression = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return str(error)
    return {name for name in names if expression.fullmatch(name)}
