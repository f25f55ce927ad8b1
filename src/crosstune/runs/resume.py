"""Resume a run: choose the checkpoint, its options, and the parts of its state that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.checkpoint.archive import read_note, read_unpacked_note, unpack_archive
from crosstune.checkpoint.eight_bit import holds_eight_bit, plain_moments
from crosstune.checkpoint.folders import FOLDER, checkpoint_folders, step_of
from crosstune.checkpoint.manifest import DamagedCheckpoint
from crosstune.checkpoint.read import Checkpoint, find_run, newest_valid, open_checkpoint
from crosstune.config.fit_kernels import FAST_BY_DEFAULT
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.schema import Config, options_by_name, options_on_resume
from crosstune.core.atomic_files import set_aside
from crosstune.core.errors import UserError, naming
from crosstune.core.events import Observer, Observers, Warned
from crosstune.core.measured import LossMeasurement
from crosstune.core.names import load_plugin, plugin_names
from crosstune.core.protocols import Array, SessionState
from crosstune.core.record import holds_record
from crosstune.core.run_lock import hold
from crosstune.data.dataset_list import DatasetEntry, join_entries
from crosstune.runs.folder import run_folder

KEPT_FILES = {"mlx_config": "mlx_config.yaml", "chat_template": "chat_template.jinja"}
"""Option that may name a file -> the run's copy of it."""


def wants_checkpoint(config: Config) -> bool:
    return config.resume != "none"


def names_path(config: Config) -> bool:
    return config.resume not in ("none", "auto")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request, completed with the run that it continues."""

    config: Config
    checkpoint: Checkpoint | None = None
    """The checkpoint to continue from; None for a new run."""


def read_request(request: Config, *, observer: Observer, hashes: bool = True) -> Request:
    """Open the checkpoint that a request continues from, and complete the request with the options of its run.

    Damaged checkpoints are skipped with a warning. Without `hashes` the weights are not checked, which is enough to read
    options. To train, hold the lock of the run before: another process may be continuing it.
    """
    if request.resume == "none":
        return Request(config=request)
    if request.resume == "auto":
        _check_named(request)
        checkpoint = _newest(run_folder(request) / FOLDER, observer, hashes=hashes)
        config = request if checkpoint is None else _continue_named(request, checkpoint)
        return Request(config=config, checkpoint=checkpoint)
    with naming("resume"):
        path, packed = _unpacked(request)
        checkpoint = _checkpoint_at(path, observer, hashes=hashes)
    if message := _warn_of_older_archive(request, checkpoint):
        observer.on_event(Warned(message=message))
    return Request(config=_continue_path(request, path, packed, checkpoint), checkpoint=checkpoint)


def _check_named(request: Config) -> None:
    if request.resume == "auto" and request.name is None:
        raise UserError(
            "--resume auto needs --name.",
            why="without it every run gets a new folder, and there is nothing to continue in.",
            do="name the run, or give --resume the path of one",
        )


def folder_of(request: Config, *, taken: Collection[Path] = ()) -> Path:
    """Return the folder of the run that a request starts or continues; a new name is none of those `taken`."""
    if not names_path(request):
        return run_folder(request, taken=taken)
    return run_folder(read_request(request, observer=Observers(), hashes=False).config)


def _continue_path(request: Config, path: Path, packed: Mapping[str, Any], checkpoint: Checkpoint) -> Config:
    """With --resume PATH, return the options of that run, overridden by those of this request."""
    run = path if (path / FOLDER).is_dir() else find_run(path)
    asked = checkpoint.manifest.get("asked") or {}
    known, once = (
        options_by_name(),
        options_on_resume(OnResume.ONE_START),
    )  # also by the names of older versions
    stored = {known[name].name: value for name, value in asked.items() if name in known}
    stored = {name: value for name, value in stored.items() if name not in once} | dict(packed)
    backend = str((stored | request.options_asked()).get("backend", "auto"))
    kept = kept_options(checkpoint, stored, backend=backend)
    stored |= kept | _same_rows(checkpoint, request)
    values = stored | _without_auto(request.options_asked(), kept) | {"resume": str(path)}
    values.pop("base_adapter", None)  # its weights are in the checkpoint
    here = {"name": run.name, "output_dir": str(run.parent)}
    values |= {name: value for name, value in here.items() if name not in request.asked}
    return _made(values, request, other=f"the run {run.name}")


def _continue_named(request: Config, checkpoint: Checkpoint) -> Config:
    """With --resume auto, return the options of this request and those to keep from the checkpoint."""
    values = request.options_asked()
    values.pop("base_adapter", None)  # its weights are in the checkpoint
    kept = kept_options(checkpoint, values, backend=request.backend)
    values = kept | _without_auto(values, kept)
    before = (checkpoint.manifest.get("options") or {}).get("world_size")
    if before is not None and max(1, before) != max(1, request.world_size):
        # The command is that of the run, apart from the processes there are now.
        values |= _same_rows(checkpoint, request)
    return _made(values, request, other="the checkpoint")


def _without_auto(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request without `auto` where the choice of the earlier part is kept."""
    return {name: value for name, value in values.items() if name not in kept or value != "auto"}


def _made(values: Mapping[str, Any], request: Config, *, other: str) -> Config:
    """Make a configuration, whose values come from the request or from `other`."""
    config = make_config(**values)
    sources = {name: request.asked.get(name, other) for name in config.asked}
    return dataclasses.replace(config, asked=sources, renamed=request.renamed)


def kept_options(checkpoint: Checkpoint, asked: Mapping[str, Any], *, backend: str) -> dict[str, Any]:
    """Return options to keep from the earlier part of a run: what its recipe chose for the backend it began on, the
    precision and the layers it chose on this backend, whose rounding its numbers have, the optimizer its moments belong to,
    and the run's copies of missing files."""
    manifest = checkpoint.manifest
    kept = {
        name: value
        for name, value in (manifest.get("options") or {}).items()
        if name in _preset_options(manifest) and name not in asked
    }
    here = backend in ("auto", manifest["backend"])
    if here and asked.get("precision", "auto") == "auto":
        kept["precision"] = manifest["precision"]
    # Fast layers that were chosen are chosen again, where they run: on any CPU, though how fast it is at 16-bit products,
    # on which the choice depends, is measured anew.
    before = (manifest.get("options") or {}).get("kernels", "general")  # the only ones before the option
    if manifest["backend"] in FAST_BY_DEFAULT and here and asked.get("kernels", "auto") == "auto":
        kept |= {"kernels": before} if before == "general" or manifest["backend"] == "cpu" else {}
    used = manifest["identity"].get("optimizer")
    if used and asked.get("optimizer", used) != used:
        kept["optimizer"] = used
    for option, name in KEPT_FILES.items():
        file, copy = asked.get(option), find_run(checkpoint.folder) / name
        if file and not Path(file).expanduser().is_file() and copy.is_file():
            kept[option] = str(copy)
    return kept


def _preset_options(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return the options that the recipe of a run may choose by the backend, and that are not the machine's own."""
    name = manifest.get("recipe")
    if name not in plugin_names("crosstune.recipes"):  # a manifest without it, or a recipe that is not here
        return frozenset()
    recipe = load_plugin("crosstune.recipes", str(name), kind="recipe")
    return frozenset(getattr(recipe, "PRESET_OPTIONS", ())) - options_on_resume(OnResume.OWN_MACHINE)


def _same_rows(checkpoint: Checkpoint, config: Config) -> dict[str, int]:
    """Adapt gradient accumulation to another number of processes, so that a step keeps its rows. Where they cannot be
    divided evenly, some processes have a micro-batch less than others."""
    rows = (checkpoint.manifest["identity"].get("order") or {}).get("rows_per_step")
    batch_size = config.batch_size if "batch_size" in config.asked else None
    batch_size = batch_size or (checkpoint.manifest.get("options") or {}).get("batch_size")
    if not rows or not batch_size or "world_size" not in config.asked or config.world_size < 1:
        return {}
    at_once = batch_size * config.world_size
    return {
        "gradient_accumulation_steps": -(-rows // at_once),
        "rows_per_step": rows if rows % at_once else 0,
    }


def _unpacked(config: Config) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run, unpacking an archive, and the options for the files that came with it."""
    path = Path(config.resume).expanduser()
    target: dict[str, Any] = {}
    if path.is_file():
        note = read_note(path)
        folder = Path(config.output_dir).expanduser() / (config.name or note["run"])
        if not folder.exists():
            _unpack_once(path, folder)
        if read_unpacked_note(folder) != note:
            raise UserError(
                f"{folder} already exists and is not from {path}.",
                do="choose another --name for the run in the archive",
            )
        path, target = folder, {"backend": note["to"]}
    note = read_unpacked_note(path) if path.is_dir() else {}
    files = {option: _unpacked_value(path, place) for option, place in (note.get("options") or {}).items()}
    return path, files | target


def _unpack_once(archive: Path, folder: Path) -> None:
    """Unpack an archive under the lock of its run: of several starts at once, one unpacks it."""
    with hold(folder):
        if not folder.exists():
            unpack_archive(archive, folder)


def _unpacked_value(run: Path, place: Any) -> str:
    """Return the value of an option whose file is in the archive; for several data sources, their list."""
    if isinstance(place, str):
        return str(run / place)
    return join_entries(
        [
            DatasetEntry(
                name=str(run / one["file"]) if "file" in one else one["name"], weight=one.get("weight")
            )
            for one in place
        ]
    )


def _warn_of_older_archive(request: Config, checkpoint: Checkpoint) -> str | None:
    """Return a warning if --resume names an archive whose unpacked run has continued since."""
    path = Path(request.resume).expanduser()
    if not path.is_file():
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


def settle_folder(folder: Path, checkpoint: Checkpoint) -> list[Path]:
    """Set aside the checkpoints after the one to continue from, whose steps are repeated."""
    later = [path for step, path in checkpoint_folders(folder / FOLDER) if step > checkpoint.step]
    return [set_aside(path) for path in later]


def continues_in_place(folder: Path, checkpoint: Checkpoint) -> bool:
    return find_run(checkpoint.folder) == folder.resolve()


def measured_before(checkpoint: Checkpoint) -> LossMeasurement | None:
    """Return the loss that `crosstune move` measured at this checkpoint, if any."""
    note = read_unpacked_note(find_run(checkpoint.folder))
    found = note.get("measured")
    return LossMeasurement.from_json(found) if found and found["step"] == checkpoint.step else None


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


def _newest(root: Path, observer: Observer, *, hashes: bool) -> Checkpoint | None:
    damaged: list[DamagedCheckpoint] = []
    found = newest_valid(root, on_damaged=damaged.append, hashes=hashes)
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


def _checkpoint_at(path: Path, observer: Observer, *, hashes: bool) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid one of the run at `path`."""
    if not (path / FOLDER).is_dir() and not holds_record(path):
        return open_checkpoint(path.resolve(), hashes=hashes)
    found = _newest(path / FOLDER, observer, hashes=hashes)
    if found is None:
        raise UserError(
            f"{path} has no checkpoint to continue from.",
            do="start a new run with --save_steps N; `crosstune checkpoint verify RUN` lists the existing ones",
        )
    return found
