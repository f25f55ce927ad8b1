"""Find plug-ins by file name, suggest alternatives to an unknown name, and match and sort layer names."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Iterable, Sequence
from types import ModuleType

from crosstune.core.errors import UserError, shown

LONGEST_PATTERNS = 100_000
"""Maximum total length of a request's patterns."""
_MOST_NAMES = 60
"""A longer list is not printed."""
_NESTED_REPETITION = re.compile(r"\([^()]*[*+}][^()]*\)[*+{]")


def plugin_names(package: str) -> list[str]:
    """Return the public module names in a package, without importing them."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    modules = pkgutil.iter_modules(list(spec.submodule_search_locations))
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def load_plugin(package: str, name: str, *, kind: str) -> ModuleType:
    """Import `package.name`; raise a UserError with the existing names when it is unknown."""
    names = plugin_names(package)
    if name not in names:
        raise unknown_name(kind, name, names)
    return importlib.import_module(f"{package}.{name}")


def nearest(name: str, names: Iterable[str]) -> list[str]:
    # The time grows with the length of the name, and all known names are short.
    return difflib.get_close_matches(name[:100], list(names), n=3, cutoff=0.6)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question with the nearest names and a space after it; empty if no name is near."""
    close = nearest(name, names)
    return f"did you mean {' or '.join(close)}? " if close else ""


def unknown_name(kind: str, name: str, names: Iterable[str]) -> UserError:
    """Return the error for a name that is not in `names`."""
    known = sorted(names)
    listed = f"The names that exist: {', '.join(known)}." if len(known) <= _MOST_NAMES else ""
    do = (
        f"{did_you_mean(name, known)}{listed}".strip() or f"choose one of the {len(known):,} names that exist"
    )
    return UserError(f"Unknown {kind} {shown(name)}.", do=do)


def natural_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def match_names(patterns: Sequence[str], names: Sequence[str]) -> list[set[str] | str]:
    """Return for each pattern the names that it matches as a whole, or why it is not a valid pattern."""
    if sum(map(len, patterns)) > LONGEST_PATTERNS:
        raise UserError(
            f"The patterns that choose layers have more than {LONGEST_PATTERNS:,} characters.",
            do="use a shorter list or pattern",
        )
    found: list[set[str] | str] = []
    for pattern in patterns:
        if _NESTED_REPETITION.search(pattern):
            raise UserError(
                f"The pattern {pattern[:80]!r} cannot be matched against layer names.",
                why="it repeats a group that contains a repetition; matching can take exponential time.",
                do="simplify lora_target_modules, or target_modules in the adapter's adapter_config.json",
            )
        try:
            expression = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            found.append(str(error))
        else:
            found.append({name for name in names if expression.fullmatch(name)})
    return found


def read_expanded_name(folder_name: str) -> tuple[int, int] | None:
    """Return the old and new number of blocks from a folder name ..._blk_exp-OLD-NEW, as used by other tools."""
    match = re.search(r"_blk_exp-(\d+)-(\d+)$", folder_name)
    return (int(match.group(1)), int(match.group(2))) if match else None
