"""Read --log_to: how to show progress, and which trackers receive the run."""

from __future__ import annotations

from crosstune.core.names import did_you_mean, plugin_names

TRACKERS_PACKAGE = "crosstune.tracking.trackers"
SCREENS = ("tqdm", "stdout")
NONE = "none"
"""No tracker, as other trainers write it."""


def targets_in(value: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in value.split(",") if part.strip()))


def trackers_in(value: str) -> list[str]:
    """Return the trackers in a value of --log_to."""
    return [name for name in targets_in(value) if name not in (*SCREENS, NONE)]


def screen_in(value: str) -> str:
    """Return how to show progress; a progress bar where only trackers are named."""
    return next((name for name in targets_in(value) if name in SCREENS), SCREENS[0])


def check_targets(value: str) -> str | None:
    """Return what --log_to takes if a value is wrong."""
    names, known = targets_in(value), [*SCREENS, *plugin_names(TRACKERS_PACKAGE), NONE]
    takes = f"one or more of {', '.join(known)}, with commas between them"
    for name in names:
        if name not in known:
            return f"{takes}; {did_you_mean(name, known)}".rstrip("; ")
    if set(SCREENS) <= set(names):
        return "either tqdm or stdout, and any trackers"
    if NONE in names and trackers_in(value):
        return f"{NONE} alone, or the names of trackers"
    return None if names else takes
