"""Find the folders of the user on this machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from crosstune.core.errors import UserError

CACHE_VARIABLE = "CROSSTUNE_CACHE"


def check_home(words: Sequence[str]) -> None:
    """Raise a UserError when a path begins with ~ and the system does not know the home folder."""
    flag = ""
    for word in words:
        name, _, path = word.partition("=") if word.startswith("--") else (flag, "", word)
        flag = word if word.startswith("--") and "=" not in word else ""
        if path.startswith("~") and os.path.expanduser(path) == path:  # noqa: PTH111 (Path raises RuntimeError)
            raise UserError(
                f"{f'{name}: the' if name else 'The'} home folder in {path} is not known.",
                why="the variable HOME is not set, or there is no such account.",
                do="give the full path",
            )


def cache_base(override: Path | None = None) -> Path:
    """Return crosstune's cache folder: `override`, or the one in the user's cache folder."""
    if override is not None:
        return override.expanduser().absolute()
    import platformdirs

    try:
        found = platformdirs.user_cache_path("crosstune")
    except RuntimeError:  # neither HOME nor an account, as in some containers
        found = Path("~")
    if not found.is_absolute():  # what older versions of platformdirs return then
        raise UserError(
            "The home folder of this user is not known, so there is no place for cached models.",
            why="the variable HOME is not set, and the system has no account for this user.",
            do=f"set {CACHE_VARIABLE} to a folder for the cache, or set HOME",
        )
    return found


def shown_path(path: str | Path) -> str:
    """Return the shortest path for a command line: relative if inside the working directory."""
    absolute = Path(path).absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)
