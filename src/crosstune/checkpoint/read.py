"""Open checkpoints: check everything, then read their arrays."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import FOLDER, checkpoint_folders, step_of
from crosstune.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    MOMENTS,
    RANDOM,
    SEAL,
    WEIGHTS,
    DamagedCheckpoint,
    Manifest,
    decode,
)
from crosstune.checkpoint.shards import describe_joined, files_of, join
from crosstune.checkpoint.tensors import CHUNK_BYTES, describe_tensors, read_tensors
from crosstune.core.errors import UserError
from crosstune.core.protocols import Array, SessionState
from crosstune.files.paths import what_runs_exist
from crosstune.files.plain_files import UnreadableFile, open_plain, read_plain

_SEAL_LIMIT = 1024


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that passed its checks."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def num_bytes(self) -> int:
        return sum(int(facts["bytes"]) for facts in self.manifest.files.values())

    def load(self) -> SessionState:
        moments: dict[str, dict[str, Array]] = {}
        try:
            for key, array in self._read(MOMENTS).items():
                slot, _, name = key.partition("/")
                moments.setdefault(slot, {})[name] = array
            weights, random = self._read(WEIGHTS), self._read(RANDOM)
        except UnreadableFile as error:
            raise DamagedCheckpoint(self.folder, error.short()) from error
        except OSError as error:
            raise DamagedCheckpoint(self.folder, str(error)) from error
        return SessionState(weights=weights, moments=moments, random=random, facts=dict(self.manifest.facts))

    def _read(self, file: str) -> dict[str, Array]:
        """Return the arrays of a file, or of all its parts, mapped into memory."""
        names = files_of(file, self.manifest.files)
        return join([read_tensors(self.folder / name, mapped=len(names) > 1) for name in names])


def open_checkpoint(folder: Path, *, hashes: bool = True) -> Checkpoint:
    """Open a checkpoint after checking its manifest and the names, sizes, hashes and headers of its files.

    `hashes=False` does not read the contents of the files, for a listing.
    """
    if not folder.is_dir():
        raise missing_checkpoint(folder)
    try:
        raw, seal_found = (
            read_plain(folder / name, limit=limit, follow_links=False)
            for name, limit in ((MANIFEST, MANIFEST_LIMIT), (SEAL, _SEAL_LIMIT))
        )
        manifest = decode(raw, seal_found=seal_found, folder=folder)
        _check_step(folder, manifest)
        _check_names(folder, manifest.files)
        for name, facts in manifest.files.items():
            _check_file(folder, name, facts, hashes=hashes)
        _check_arrays(folder, manifest)
    except UnreadableFile as error:
        raise DamagedCheckpoint(folder, error.short()) from error
    except OSError as error:
        raise DamagedCheckpoint(folder, f"it cannot be read: {error}") from error
    return Checkpoint(folder=folder, manifest=manifest)


def missing_checkpoint(folder: Path) -> UserError:
    """Return the error for a missing checkpoint; it lists the existing ones."""
    others = [path.name for _, path in checkpoint_folders(folder.parent)]
    if folder.parent.name == FOLDER:
        do = f"the run has: {', '.join(others[:5])}" if others else "the run has no checkpoints"
    else:
        do = f"{what_runs_exist(folder)}; `crosstune checkpoint list RUN` lists the checkpoints of a run"
    return UserError(f"There is no checkpoint at {folder}.", do=do)


def newest_valid(
    root: Path, *, on_damaged: Callable[[DamagedCheckpoint], None] | None = None, hashes: bool = True
) -> Checkpoint | None:
    """Return the newest checkpoint that passes all checks; call `on_damaged` for each newer, damaged one."""
    for _, folder in checkpoint_folders(root):
        try:
            return open_checkpoint(folder, hashes=hashes)
        except DamagedCheckpoint as error:
            if on_damaged is not None:
                on_damaged(error)
    return None


def find_run(path: Path) -> Path:
    """Return the run folder of a path to it or to one of its checkpoints."""
    folder = path.resolve()
    return folder.parent.parent if folder.parent.name == FOLDER else folder


def _check_step(folder: Path, manifest: Manifest) -> None:
    """Check that the folder name and the manifest agree on the step."""
    named = (step_of(folder), manifest.schedule.get("step"), manifest.progress.get("steps"))
    if any(step not in (None, manifest.step) for step in named):
        raise DamagedCheckpoint(folder, f"its name and {MANIFEST} have different steps")


def _check_names(folder: Path, files: Mapping[str, Any]) -> None:
    """Check that all files of the manifest exist. Other files, such as .DS_Store of macOS, are ignored."""
    found = {entry.name for entry in os.scandir(folder)}
    needed = [file for file in (WEIGHTS, MOMENTS, RANDOM) if not files_of(file, files)]
    if missing := sorted({*needed, MANIFEST, SEAL, *files} - found):
        raise DamagedCheckpoint(folder, f"{missing[0]} is missing")
    if needed:
        raise DamagedCheckpoint(folder, f"{MANIFEST} does not list {needed[0]}")


def _check_file(folder: Path, name: str, facts: Mapping[str, Any], *, hashes: bool) -> None:
    with open_plain(folder / name, follow_links=False) as file:
        size = os.fstat(file.fileno()).st_size
        if size != facts["bytes"]:
            raise DamagedCheckpoint(folder, f"{name} has {size} bytes, not {facts['bytes']}")
        if not hashes:
            return
        sha = hashlib.sha256()
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
    if sha.hexdigest() != facts["sha256"]:
        raise DamagedCheckpoint(folder, f"the contents of {name} have changed since it was written")


def _check_arrays(folder: Path, manifest: Manifest) -> None:
    """Check that the files contain the arrays that the manifest lists."""
    found = {
        file: describe_joined([describe_tensors(folder / name) for name in files_of(file, manifest.files)])
        for file in (WEIGHTS, MOMENTS, RANDOM)
    }
    described = {name: [dtype, list(shape)] for name, (dtype, shape) in found[WEIGHTS].items()}
    listed = {name: [facts.get("dtype"), facts.get("shape")] for name, facts in manifest.trainable.items()}
    if described != listed:
        raise DamagedCheckpoint(
            folder, f"{WEIGHTS} does not contain the trained weights that {MANIFEST} lists"
        )
    unknown = [key for key in found[MOMENTS] if key.partition("/")[2] not in described]
    if unknown:
        raise DamagedCheckpoint(folder, f"{MOMENTS} contains {unknown[0]!r}, which belongs to no weight")
