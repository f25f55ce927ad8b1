"""Continue a run in its folder after a restart: remember the folder, and change the request."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from crosstune.config.schema import Config
from crosstune.core.ranks import Group

_NOTE = "run-folder"


def remember_folder(group: Group, folder: Path) -> None:
    """Remember the run folder for the next attempt."""
    if group.ranks.launch_folder is None:
        group.remember(str(folder.absolute()))
    elif group.ranks.first:
        (Path(group.ranks.launch_folder) / _NOTE).write_text(str(folder.absolute()), encoding="utf-8")


def recall_folder(group: Group) -> Path | None:
    """Return the run folder of an earlier attempt; None in the first attempt, or if there was none yet."""
    ranks = group.ranks
    if ranks.attempt == 0:
        return None
    if ranks.launch_folder is None:
        text = group.recall()
    else:
        note = Path(ranks.launch_folder) / _NOTE
        text = group.share(note.read_text(encoding="utf-8") if ranks.first and note.is_file() else "")
    return Path(text) if text else None


def restarted(config: Config, folder: Path, *, has_checkpoint: bool) -> Config:
    """Return the request of a restarted process: continue from the newest checkpoint, or begin the run again."""
    changed: dict[str, Any] = {"name": folder.name, "output_dir": str(folder.parent)}
    changed |= {"resume": str(folder), "overwrite": False} if has_checkpoint else {"overwrite": True}
    asked = {**config.sources, **dict.fromkeys(changed, "the restart")}
    if has_checkpoint:
        asked.pop("overwrite")
    return dataclasses.replace(config, **changed, sources=asked)
