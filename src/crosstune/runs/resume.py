"""Resume a run: choose the checkpoint, its options, and the parts of its state that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.checkpoint.archive import read_note, read_unpacked_note, unpack_archive
from crosstune.checkpoint.eight_bit import holds_eight_bit, plain_moments
from crosstune.checkpoint.folders import FOLDER, checkpoint_folders, step_of
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import Checkpoint, find_run, newest_valid, open_checkpoint
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.schema import Config, options_on_resume
from crosstune.core.atomic_files import set_aside
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.core.measured import Measured
from crosstune.core.protocols import Array, SessionState
from crosstune.core.record import holds_run

MLX_CONFIG_COPY = "mlx_config.yaml"


def wants_checkpoint(config: Config) -> bool:
    return config.resume != "none"


def names_path(config: Config) -> bool:
    return config.resume not in ("none", "auto")


def complete_config(config: Config) -> Config:
    """With --resume PATH, return the options of that run, overridden by those of this request."""
    if not names_path(config):
        return config
    path, packed = _unpacked(config)
    checkpoint = _checkpoint_at(path)
    run = path if (path / FOLDER).is_dir() else find_run(path)
    asked = checkpoint.manifest.get("asked") or {}
    known = set(config.options()) - options_on_resume(OnResume.ONE_START)
    stored = {name: value for name, value in asked.items() if name in known} | packed
    backend = str((stored | config.options_asked()).get("backend", "auto"))
    stored |= kept_options(checkpoint, stored, backend=backend) | _same_rows(checkpoint, config)
    values = stored | config.options_asked() | {"resume": str(path)}
    values.pop("base_adapter", None)  # its weights are in the checkpoint
    if "name" not in config.asked and "output_dir" not in config.asked:
        values |= {"name": run.name, "output_dir": str(run.parent)}
    complete = make_config(**values)
    sources = {name: config.asked.get(name, f"the run {run.name}") for name in complete.asked}
    return dataclasses.replace(complete, asked=sources)


def without_start_adapter(config: Config, checkpoint: Checkpoint) -> Config:
    """Return the configuration without --base_adapter, whose weights are in the checkpoint."""
    values = config.options_asked()
    values.pop("base_adapter", None)
    if config.resume == "auto":  # --resume PATH already has the options of the run
        values = kept_options(checkpoint, values, backend=config.backend) | values
    found = make_config(**values)
    sources = {name: config.asked.get(name, "the checkpoint") for name in found.asked}
    return dataclasses.replace(found, asked=sources)


def kept_options(checkpoint: Checkpoint, asked: Mapping[str, Any], *, backend: str) -> dict[str, Any]:
    """Return options to keep from the earlier part of a run: the precision it chose on this backend, the optimizer its
    moments belong to, and the run's copy of a missing --mlx_config file."""
    manifest, kept = checkpoint.manifest, dict[str, Any]()
    if backend in ("auto", manifest["backend"]) and asked.get("precision", "auto") == "auto":
        kept["precision"] = manifest["precision"]
    used = manifest["identity"].get("optimizer")
    if used and asked.get("optimizer", used) != used:
        kept["optimizer"] = used
    file = asked.get("mlx_config")
    copy = find_run(checkpoint.folder) / MLX_CONFIG_COPY
    if file and not Path(file).expanduser().is_file() and copy.is_file():
        kept["mlx_config"] = str(copy)
    return kept


def _same_rows(checkpoint: Checkpoint, config: Config) -> dict[str, int]:
    """Adapt gradient accumulation to another number of processes, so that a step keeps its rows."""
    rows = (checkpoint.manifest["identity"].get("order") or {}).get("rows_per_step")
    batch_size = config.batch_size if "batch_size" in config.asked else None
    batch_size = batch_size or (checkpoint.manifest.get("options") or {}).get("batch_size")
    if not rows or not batch_size or "world_size" not in config.asked or config.world_size < 1:
        return {}
    at_once = batch_size * config.world_size
    return {"gradient_accumulation_steps": rows // at_once} if rows % at_once == 0 else {}


def _unpacked(config: Config) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run, unpacking an archive, and the options for the files that came with it."""
    path = Path(config.resume).expanduser()
    target: dict[str, Any] = {}
    if path.is_file():
        note = read_note(path)
        folder = Path(config.output_dir).expanduser() / (config.name or note["run"])
        if not folder.exists():
            unpack_archive(path, folder)
        elif read_unpacked_note(folder) != note:
            raise UserError(
                f"{folder} already exists and is not from {path}.",
                do="choose another --name for the run in the archive",
            )
        path, target = folder, {"backend": note["to"]}
    note = read_unpacked_note(path) if path.is_dir() else {}
    files = {option: str(path / place) for option, place in (note.get("options") or {}).items()}
    return path, files | target


def warn_of_older_archive(request: Config, checkpoint: Checkpoint) -> str | None:
    """Return a warning if --resume names an archive whose unpacked run has continued since."""
    path = Path(request.resume).expanduser()
    if not names_path(request) or not path.is_file():
        return None
    step: int = read_note(path)["step"]
    if step == checkpoint.step:
        return None
    return (
        f"{path} was already unpacked to {find_run(checkpoint.folder)}: the run continues there at step "
        f"{checkpoint.step}, not at step {step} of the archive; use another --name to start from the archive"
    )


def for_record(config: Config) -> Config:
    """Return the configuration to record, without options that apply to a single start."""
    once = options_on_resume(OnResume.ONE_START)
    asked = {name: source for name, source in config.asked.items() if name not in once}
    return dataclasses.replace(config, asked=asked)


def find_checkpoint(config: Config, folder: Path, observer: Observer) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None if `auto` finds none. Damaged ones are skipped with a warning."""
    if config.resume == "none":
        return None
    if config.resume == "auto":
        if config.name is None:
            raise UserError(
                "--resume auto needs --name.",
                why="without it every run gets a new folder, and there is nothing to continue in.",
                do="name the run, or give --resume the path of one",
            )
        root = folder / FOLDER
    else:
        path = Path(config.resume).expanduser()
        if not (path / FOLDER).is_dir():
            return _checkpoint_at(path)
        root = path / FOLDER
    return _newest(root, observer)


def settle_folder(folder: Path, checkpoint: Checkpoint) -> list[Path]:
    """Set aside the checkpoints after the one to continue from, whose steps are repeated."""
    later = [path for step, path in checkpoint_folders(folder / FOLDER) if step > checkpoint.step]
    return [set_aside(path) for path in later]


def continues_in_place(folder: Path, checkpoint: Checkpoint) -> bool:
    return find_run(checkpoint.folder) == folder.resolve()


def measured_before(checkpoint: Checkpoint) -> Measured | None:
    """Return the loss that `crosstune move` measured at this checkpoint, if any."""
    note = read_unpacked_note(find_run(checkpoint.folder))
    found = note.get("measured")
    return Measured.from_json(found) if found and found["step"] == checkpoint.step else None


def fitting_state(
    state: SessionState, *, current: Mapping[str, Array] | None, optimizer: str, moments: bool
) -> SessionState:
    """Return the state for a session: all of the stored one or, given the session's `current` weights, the stored arrays
    that match them in name and shape, and the current ones otherwise.

    8-bit moments are dequantized for an optimizer with fp32 moments.
    """
    kept: Mapping[str, Mapping[str, Array]] = state.moments if moments else {}
    if holds_eight_bit(kept) and not optimizer.endswith("_8bit"):
        kept = plain_moments(kept, state.weights)
    if current is None:
        return dataclasses.replace(state, moments=kept)
    fits = {n for n, a in state.weights.items() if n in current and current[n].shape == a.shape}
    if not fits:
        raise UserError(
            "Nothing that the checkpoint has learned fits this run.",
            why="none of its arrays has the name and shape of a trained array.",
            do="continue with its own method, rank and targets, or start a new run",
        )
    weights = {name: state.weights[name] if name in fits else array for name, array in current.items()}
    kept = {slot: {n: a for n, a in arrays.items() if n in fits} for slot, arrays in kept.items()}
    return dataclasses.replace(state, weights=weights, moments=kept)


def skip_warning(error: DamagedCheckpoint) -> Warned:
    """Return the warning about a damaged checkpoint that is skipped."""
    return Warned(message=f"skipped: {error.asked} {error.why}")


def _newest(root: Path, observer: Observer) -> Checkpoint | None:
    damaged: list[DamagedCheckpoint] = []
    found = newest_valid(root, on_damaged=damaged.append)
    for error in damaged:
        observer.on_event(skip_warning(error))
    not_folders = [path for path in root.iterdir() if step_of(path) is not None] if root.is_dir() else []
    if found is None and not damaged and not_folders:
        raise UserError(
            f"{not_folders[0]} is not a folder of this run.",
            why="a symlink or file in place of a checkpoint folder is not followed.",
            do="put the folder itself there, or give its path with --resume PATH",
        )
    if found is None and damaged:
        raise UserError(
            f"None of the {len(damaged)} checkpoints in {root} is intact.",
            why=damaged[0].why,
            do="restore one from a copy, or start over with --resume none --overwrite",
        )
    return found


def _checkpoint_at(path: Path) -> Checkpoint:
    if not (path / FOLDER).is_dir() and not holds_run(path):
        return open_checkpoint(path.resolve())
    found = newest_valid(path / FOLDER)
    if found is None:
        raise UserError(
            f"{path} has no checkpoint to continue from.",
            do="start a new run with --save_steps N; `crosstune checkpoint verify RUN` lists the existing ones",
        )
    return found
