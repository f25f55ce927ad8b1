"""Find the folders of the user on this machine."""

from __future__ import annotations

from pathlib import Path

from crosstune.core.errors import UserError

CACHE_VARIABLE = "CROSSTUNE_CACHE"


def cache_base(override: Path | None = None) -> Path:
    """Return crosstune's cache folder: `override`, or the one in the user's cache folder."""
    if override is not None:
        return override.expanduser().absolute()
    import platformdirs

    found = platformdirs.user_cache_path("crosstune")
    if not found.is_absolute():  # neither HOME nor an account, as in some containers
        raise UserError(
            "The home folder of this user is not known, so there is no place for cached models.",
            why="the variable HOME is not set, and the system has no account for this user.",
            do=f"set {CACHE_VARIABLE} to a folder for the cache, or set HOME",
        )
    return found
