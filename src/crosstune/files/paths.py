"""Suggest existing paths and runs for a missing one; find the cache folder; shorten paths."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.core.names import nearest
from crosstune.files.plain_files import kind_of

CACHE_VARIABLE = "CROSSTUNE_CACHE"
RUNS = "runs"
"""The default runs folder."""
MAX_RUNS = 5


def near_paths(path: str | Path) -> list[str]:
    """Return existing paths with similar names in the folder of a missing path."""
    wanted = Path(path)
    if not wanted.name:
        return []
    # Compare lower-case stems: case and suffix are often mistyped, and equal suffixes do not make names similar.
    stems: dict[str, list[str]] = {}
    for entry in _entries(wanted.expanduser().parent):
        stems.setdefault(Path(entry.name).stem.lower(), []).append(entry.name)
    close = [name for stem in nearest(wanted.stem.lower(), stems) for name in sorted(stems[stem])]
    return [str(wanted.with_name(name)) for name in close[:3]]


def sibling_runs(folder: Path) -> list[Path]:
    """Return the runs in the parent of a folder, the newest first."""
    from crosstune.files.run_record import (
        is_run_folder,  # not for `crosstune --help`, which reads this module
    )

    found = [Path(entry.path) for entry in _entries(folder.absolute().parent)]
    return sorted((path for path in found if is_run_folder(path)), key=_changed, reverse=True)


def what_runs_exist(target: str | Path) -> str:
    """Return runs with similar names, or the newest in the same folder; a name is looked up among the runs in RUNS too."""
    wanted = Path(target)
    runs = [run.name for run in sibling_runs(wanted.expanduser())]
    if not runs and (wanted.name == str(wanted) or wanted.absolute().parent == Path.cwd()):
        wanted = Path(RUNS) / wanted.name
        runs = [run.name for run in sibling_runs(wanted)]
    if close := nearest(wanted.name, runs):
        return f"did you mean {' or '.join(str(wanted.with_name(name)) for name in close)}?"
    if runs:
        newest = ", ".join(str(wanted.with_name(name)) for name in runs[:MAX_RUNS])
        return f"the newest runs there: {newest}"
    return f"there are no runs in {wanted.expanduser().absolute().parent}"


def named_run(target: str, *, parent: str | Path = RUNS) -> str:
    """Return the path of the run with this name in `parent`; return anything else as it is, such as a path."""
    inside = Path(parent).expanduser() / target
    is_name = Path(target).name == target and not Path(target).exists()
    return str(inside) if is_name and inside.is_dir() else target


def missing_run(target: str | Path) -> UserError:
    """Return the error for a run that does not exist."""
    path = Path(target).expanduser().absolute()
    return UserError(
        f"There is no run {target}.",
        why=f"{path} is {kind_of(path)}, not a folder."
        if os.path.lexists(path)
        else f"{path} does not exist.",
        do=what_runs_exist(target),
    )


def user_cache() -> Path:
    """Return crosstune's folder in the user's cache folder."""
    import platformdirs

    try:
        found = platformdirs.user_cache_path("crosstune")
    except RuntimeError:  # neither HOME nor an account, as in some containers
        found = Path("~")
    if not found.is_absolute():  # the result of older versions of platformdirs
        raise UserError(
            "The home folder of this user is not known, so there is no place for cached models.",
            why="$HOME is not set, and the system has no account for this user.",
            do=f"set {CACHE_VARIABLE} to a folder for the cache, or set HOME",
        )
    return found


def shown_path(path: str | Path) -> str:
    """Return the shortest path for a command line: relative if inside the working directory."""
    absolute = Path(path).absolute()
    here = Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(".")]
    except OSError:  # missing or not readable: nothing to suggest
        return []


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # removed since it was listed
        return 0.0
