"""Connect the processes of a run, check that they agree, and remember the run folder across restarts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.config.time_limits import limits_of
from crosstune.core import __version__
from crosstune.core.errors import UserError
from crosstune.distributed.watchdog import FolderBoard, Watchdog
from crosstune.estimate.machine import Machine
from crosstune.files.json_files import finite
from crosstune.process.ranks import Group, Limits, Ranks, SingleProcess
from crosstune.process.this_process import note_connected, note_left

SHARED_FOLDER_S = 20.0
"""Time for a file to appear on another node."""
_TOKEN = ".shared"
"""File in the run folder that shows whether the folder is shared."""
_RUN_FOLDER = "run-folder"
"""File in the launcher's folder with the path of the run folder."""


@contextlib.contextmanager
def connected(config: Config, ranks: Ranks | None) -> Iterator[Group]:
    """Connect to the other processes of the run; until the context exits, watch for one that hangs."""
    limits = limits_of(config)
    group = connect(ranks, limits)
    if ranks is None:
        yield group
        return
    note_connected()
    check_versions(group)
    folder = group.ranks.launch_folder
    watchdog = Watchdog(
        group.ranks,
        group.activity,
        limit_s=limits.collective_s,
        own=FolderBoard(Path(folder)) if folder is not None else None,
        shared=group.open_board(),
    )
    watchdog.start()
    try:
        yield group
    finally:
        stopped = watchdog.stop()
    group.close()  # not after an error: the others may wait for us in a collective, and we would wait for them
    if stopped:
        note_left()


def connect(ranks: Ranks | None, limits: Limits | None = None) -> Group:
    """Connect to the other processes of the run with the engine's collectives."""
    if ranks is None:
        return SingleProcess()
    engine = importlib.import_module(f"crosstune.{ranks.engine}_engine.group")
    group: Group = engine.connect(ranks, limits if limits is not None else Limits())
    return group


@contextlib.contextmanager
def errors_with_rank(group: Group) -> Iterator[None]:
    """Prefix errors with the rank and its host, except on rank 0."""
    try:
        yield
    except UserError as error:
        if not group.ranks.first and not error.message.startswith(group.ranks.name):
            error.message = f"{group.ranks.name}: {error.message}"
        raise


@contextlib.contextmanager
def first_on_each_host(group: Group) -> Iterator[None]:
    """Run the context on one process of each host first, so that the others find its results cached."""
    is_first = group.ranks.local_rank == 0
    if not is_first:
        group.barrier()
    yield
    if is_first:
        group.barrier()


def share_machine(group: Group, probe: Callable[[], Machine]) -> Machine:
    """Return rank 0's machine report, so that all processes make the same plan."""
    if group.ranks.size == 1:
        return probe()
    text = group.broadcast(json.dumps(probe().to_json()) if group.ranks.first else "")
    return Machine.from_json(json.loads(text), source="rank 0")


def check_versions(group: Group) -> None:
    """Raise a UserError in every process unless all have the same versions of crosstune and the engine."""
    engine = group.ranks.engine
    own = f"crosstune {__version__}, {engine} {importlib.metadata.version(engine)}"
    if not group.all_equal(own):
        raise UserError(
            f"The {group.ranks.size} processes of the run have different versions.",
            why=f"{group.ranks.name} has {own}; rank 0 has {group.broadcast(own)}.",
            do="install the same versions on every node",
        )


def check_shared_folder(group: Group, folder: Path) -> None:
    """Raise a UserError in every process unless all see the run folder of rank 0."""
    if group.ranks.num_nodes == 1:
        return
    token = folder / _TOKEN
    word = group.broadcast(secrets.token_hex(8))
    if group.ranks.first:
        token.write_text(word, encoding="utf-8")
    group.barrier()
    seen = group.ranks.first or _sees(token, word)
    missing = group.any(not seen)
    if group.ranks.first:
        token.unlink(missing_ok=True)
    if missing:
        name = "another rank" if seen else group.ranks.name
        raise UserError(
            f"The run folder {folder} is not shared by all nodes.",
            why=f"every process uses the checkpoints in it, and {name} does not see what rank 0 writes.",
            do="put --output_dir on a file system that all nodes have mounted at the same path",
        )


def _sees(token: Path, word: str) -> bool:
    """Wait for the token to appear; a network file system may show it late."""
    deadline = time.monotonic() + SHARED_FOLDER_S
    while True:
        with contextlib.suppress(OSError):
            if token.read_text(encoding="utf-8") == word:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


def check_same_everywhere(group: Group, parts: Mapping[str, Any]) -> None:
    """Raise a UserError in every process unless the parts are the same in all."""
    other = [
        f"{name}{_differing_keys(group, part) if name == 'options' else ''}"
        for name, part in parts.items()
        if not group.all_equal(_as_text(part))
    ]
    if other:
        raise UserError(
            f"The {group.ranks.size} processes of the run differ: {', '.join(other)}.",
            why="all need the same options, model, data and checkpoint.",
            do="start all of them with the same command, and copy the same files to every node",
        )


def _differing_keys(group: Group, part: Mapping[str, Any]) -> str:
    """Return the differing keys of a part in parentheses; every process must call it."""
    keys: list[str] = json.loads(group.broadcast(json.dumps(list(part))))
    differing = [key for key in keys if not group.all_equal(_as_text(part.get(key)))]
    return f" ({', '.join(differing[:8])})" if differing else ""


def _as_text(part: Any) -> str:
    return json.dumps(finite(part), sort_keys=True, default=str)


def with_world(config: Config, ranks: Ranks) -> Config:
    """Set world_size to the number of processes, so that the record of the run has it."""
    if ranks.size == 1 or config.world_size != -1:
        return config
    asked = {**config.sources, "world_size": "the processes that were started"}
    return dataclasses.replace(config, world_size=ranks.size, sources=asked)


def check_started(plan: Plan, ranks: Ranks) -> None:
    """Raise a UserError if the plan has more processes than were started."""
    if plan.world_size != ranks.size:
        raise UserError(
            f"--world_size is {plan.world_size}, but only this process was started.",
            why="a Python program does not start other processes.",
            do="use the command `crosstune train`, which starts them; or torchrun or mlx.launch",
        )


def remember_folder(group: Group, folder: Path) -> None:
    """Remember the run folder for the next attempt."""
    if group.ranks.launch_folder is None:
        group.remember(str(folder.absolute()))
    elif group.ranks.first:
        (Path(group.ranks.launch_folder) / _RUN_FOLDER).write_text(str(folder.absolute()), encoding="utf-8")


def recall_folder(group: Group) -> Path | None:
    """Return the run folder of an earlier attempt; None in the first attempt, or if there was none yet."""
    ranks = group.ranks
    if ranks.attempt == 0:
        return None
    if ranks.launch_folder is None:
        text = group.recall()
    else:
        note = Path(ranks.launch_folder) / _RUN_FOLDER
        text = group.broadcast(note.read_text(encoding="utf-8") if ranks.first and note.is_file() else "")
    return Path(text) if text else None


def restarted(config: Config, folder: Path, *, has_checkpoint: bool) -> Config:
    """Return the request of a restarted process: resume from the newest checkpoint, or start over without one."""
    changed: dict[str, Any] = {"name": folder.name, "output_dir": str(folder.parent)}
    changed |= {"resume": str(folder), "overwrite": False} if has_checkpoint else {"overwrite": True}
    asked = {**config.sources, **dict.fromkeys(changed, "the restart")}
    if has_checkpoint:
        asked.pop("overwrite")
    return dataclasses.replace(config, **changed, sources=asked)
