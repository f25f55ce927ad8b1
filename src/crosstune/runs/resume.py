"""Open the checkpoint that a request continues from, and complete the request with the options of its run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.checkpoint.archive import read_note, read_unpacked_note, unpack_archive
from crosstune.checkpoint.folders import FOLDER, checkpoint_folders
from crosstune.checkpoint.manifest import MANIFEST, DamagedCheckpoint, Manifest
from crosstune.checkpoint.read import Checkpoint, find_run, newest_valid, open_checkpoint
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.options.training import AUTO
from crosstune.config.recipe_spec import load_recipe, recipe_names, trained_name
from crosstune.config.resolve.fit_compute import FAST_BY_DEFAULT
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config, options_by_name, options_on_resume
from crosstune.core.errors import UserError, naming
from crosstune.core.events import Observer, Warned
from crosstune.core.loss_measurement import LossMeasurement
from crosstune.data.batches.row_order import num_at_once
from crosstune.data.read.dataset_list import DatasetEntry, join_entries
from crosstune.files.atomic_files import set_aside
from crosstune.files.paths import named_run
from crosstune.files.run_lock import hold
from crosstune.files.run_record import has_record, read_log
from crosstune.runs.resume_identity import Difference, changed_options, check_same, find_differences

LONGEST_PART = 60
"""Characters of the model's name in the name of a run."""
FIRST_ADAPTER = "first_adapter"
"""The run's copy of --base_adapter, for a recipe that needs the first weights."""
KEPT_FILES = {"mlx_config": "mlx_config.yaml", "chat_template": "chat_template.jinja"}
"""Option -> the run's copy of the file it names."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a run continues from, and how the run differs from it."""

    checkpoint: Checkpoint
    measured: LossMeasurement | None = None
    """The loss of the next batches before the move, if `crosstune move` measured it."""
    differences: Sequence[Difference] = ()
    """Allowed by --allow_mismatch."""
    adapted: Sequence[Difference] = ()
    """Expected on a different backend."""
    changes: Sequence[Difference] = ()
    """Changed options that affect the training."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    @property
    def run(self) -> Path:
        """The run folder of the checkpoint."""
        return find_run(self.checkpoint.folder)

    def is_in(self, folder: Path) -> bool:
        return self.run == folder.resolve()

    def compared(self, plan: Plan, identified: Mapping[str, Any]) -> ResumePoint:
        """Return the point with its differences from a plan; raise if one is neither expected nor allowed."""
        differences, adapted = find_differences(
            plan, self.manifest, identified, measured=self.measured is not None
        )
        check_same(differences, self.manifest, plan.config)
        changes = changed_options(self.manifest, plan.config)
        return dataclasses.replace(self, differences=differences, adapted=adapted, changes=changes)

    def set_later_aside(self) -> list[Path]:
        """Rename the checkpoints after this one, whose steps are trained again; return their new paths."""
        folders = checkpoint_folders(self.run / FOLDER)
        return [set_aside(path) for step, path in folders if step > self.step]

    def facts(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.step,
            "backend": self.manifest.backend,
            "adapted": [difference.sentence() for difference in self.adapted],
            "allowed_differences": [difference.sentence() for difference in self.differences],
            "changed_options": [change.sentence() for change in self.changes],
        }


def run_folder(config: Config, *, taken: Collection[Path] = ()) -> Path:
    """Return the run folder: --name, or a free name made of the time and the model (or the recipe, if it builds its own
    model)."""
    parent = Path(config.output_dir).expanduser()
    if config.name is not None:
        return parent / config.name
    what = Path(trained_name(config).rstrip("/")).name[:LONGEST_PART]
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{what}"
    folders = (parent / (stem if n == 1 else f"{stem}-{n}") for n in itertools.count(1))
    return next(folder for folder in folders if not folder.exists() and folder not in taken)


def names_path(config: Config) -> bool:
    return config.resume not in ("none", "auto")


def find_resumed_folder(request: Config) -> Path:
    """Return the run folder of --resume PATH; unpack an archive, but open no checkpoint."""
    with naming("resume"):
        path, _ = unpack_run(request)
        if not _is_run(path) and not (path / MANIFEST).is_file():
            open_checkpoint(path.resolve(), hashes=False)  # raises: there is none
    return run_folder(dataclasses.replace(request, **_place(request, _run_of(path))))


def read_request(
    request: Config, *, observer: Observer, hashes: bool = True
) -> tuple[Config, ResumePoint | None]:
    """Return the request completed with the options of the resumed run, and the point to resume from.

    Skip damaged checkpoints with a warning. `hashes=False` reads only options and does not check the weights. To train,
    hold the run lock first.
    """
    if request.resume == "none":
        return request, None
    if request.resume == "auto":
        if request.name is None:
            raise UserError(
                "--resume auto needs --name.",
                why="without a name every run gets a new folder, so there is none to continue.",
                do="pass --name, or the path of a run with --resume",
            )
        checkpoint = _newest(run_folder(request) / FOLDER, observer, hashes=hashes)
        if checkpoint is None:
            return request, None
        config = complete_named(request, checkpoint)
    else:
        with naming("resume"):
            path, packed = unpack_run(request)
            checkpoint = pick_checkpoint(path, observer, hashes=hashes)
        archive = Path(request.resume).expanduser()
        if archive.is_file() and (step := read_note(archive)["step"]) != checkpoint.step:
            message = (
                f"{archive} was already unpacked to {path}: the run continues there at step {checkpoint.step}, "
                f"not at step {step} of the archive; use a different --name to start from the archive"
            )
            observer.on_event(Warned(message=message))
        config = complete_from_path(request, path, packed, checkpoint)
    stored = checkpoint.manifest.options.get("batch_size")
    if config.batch_size == AUTO and stored:
        asked = {**config.sources, "batch_size": "the checkpoint"}
        config = dataclasses.replace(config, batch_size=stored, sources=asked)
    found = read_unpacked_note(find_run(checkpoint.folder)).get("measured")
    measured = LossMeasurement.from_json(found) if found and found["step"] == checkpoint.step else None
    return config, ResumePoint(checkpoint=checkpoint, measured=measured)


def complete_from_path(
    request: Config, path: Path, packed: Mapping[str, Any], checkpoint: Checkpoint
) -> Config:
    """Return the options of the run of --resume PATH, overridden by the request."""
    run, asked = _run_of(path), request.options_asked()
    known, once = options_by_name(), options_on_resume(OnResume.ONE_START)  # older names of an option too
    stored = {known[name].name: value for name, value in checkpoint.manifest.asked.items() if name in known}
    stored = {name: value for name, value in stored.items() if name not in once} | dict(packed)
    backend = str((stored | asked).get("backend", "auto"))
    kept = kept_options(checkpoint, stored, backend=backend)
    parts = (stored | asked).get("context_parallel", 1)
    stored |= kept | _same_rows(checkpoint, dataclasses.replace(request, context_parallel=parts))
    values = stored | _without_auto(asked, kept) | {"resume": str(path)} | _place(request, run)
    return _made(values, request, other=f"the run {run.name}")


def complete_named(request: Config, checkpoint: Checkpoint) -> Config:
    """Return the request completed for --resume auto with the options inherited from the checkpoint."""
    values = request.options_asked()
    kept = kept_options(checkpoint, values, backend=request.backend)
    values = kept | _without_auto(values, kept)
    options = checkpoint.manifest.options
    before, parts = options.get("world_size"), options.get("context_parallel", 1)
    if before is not None and max(1, before // parts) != num_at_once(request):
        values |= _same_rows(checkpoint, request)
    return _made(values, request, other="the checkpoint")


def _place(request: Config, run: Path) -> dict[str, Any]:
    """Return the name and folder of the run, unless the request sets them."""
    here = {"name": run.name, "output_dir": str(run.parent)}
    return {name: value for name, value in here.items() if name not in request.sources}


def _without_auto(values: Mapping[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a request without each `auto` that an earlier choice replaces."""
    return {name: value for name, value in values.items() if name not in kept or value != "auto"}


def _made(values: Mapping[str, Any], request: Config, *, other: str) -> Config:
    """Return a configuration whose values come from the request or from `other`."""
    # The weights of a base adapter are in the checkpoint.
    dropped = () if load_recipe(str(values.get("recipe", "sft"))).needs_first_weights else ("base_adapter",)
    config = make_config(**{name: value for name, value in values.items() if name not in dropped})
    sources = {name: request.sources.get(name, other) for name in config.sources}
    return dataclasses.replace(config, sources=sources, renamed=request.renamed)


def kept_options(checkpoint: Checkpoint, asked: Mapping[str, Any], *, backend: str) -> dict[str, Any]:
    """Return the options inherited from a checkpoint: recipe presets, the precision and kernels chosen on this backend, the
    learning rate of full fine-tuning, the rules of its data, the optimizer of its moments, and the run's copies of missing files."""
    manifest = checkpoint.manifest
    presets: frozenset[str] = frozenset()
    if manifest.recipe in recipe_names():  # older manifests have none, and a recipe may not be installed
        chosen = load_recipe(str(manifest.recipe)).preset_options
        presets = frozenset(chosen) - options_on_resume(OnResume.OWN_MACHINE)
    kept = {name: manifest.options[name] for name in presets & manifest.options.keys() - asked.keys()}
    here = backend in ("auto", manifest.backend)
    if here and asked.get("precision", "auto") == "auto":
        kept["precision"] = manifest.precision
    # Keep the fast layers on any CPU: the choice depends on the speed of 16-bit matmuls, measured at each start.
    before = manifest.options.get("kernels", "general")  # older runs had no others
    if manifest.backend in FAST_BY_DEFAULT and here and asked.get("kernels", "auto") == "auto":
        kept |= {"kernels": before} if before == "general" or manifest.backend == "cpu" else {}
    if "data_rules" not in asked:
        kept["data_rules"] = manifest.options.get("data_rules", 1)  # older runs had no others
    if "lr" not in asked and manifest.options.get("train_type") == "full" and "lr" in manifest.options:
        kept["lr"] = manifest.options["lr"]  # older runs used the default of adapters
    used = manifest.identity.get("optimizer")
    if used and asked.get("optimizer", used) != used:
        kept["optimizer"] = used
    first = find_run(checkpoint.folder) / FIRST_ADAPTER
    if first.is_dir():
        kept["base_adapter"] = str(first)
    for option, name in KEPT_FILES.items():
        file, copy = asked.get(option), find_run(checkpoint.folder) / name
        if file and not Path(file).expanduser().is_file() and copy.is_file():
            kept[option] = str(copy)
    return kept


def inherited_options(config: Config, point: ResumePoint | None) -> list[str]:
    """Return the options of a resumed run that the user did not set: chosen earlier, or for this start only."""
    if point is None:
        return []
    before = read_log(point.run / "plan.json")
    asked = before.get("asked", {}).keys() - set(before.get("inherited", ()))
    here, once = {"the checkpoint", f"the run {point.run.name}"}, options_on_resume(OnResume.ONE_START)
    return sorted(
        name
        for name, source in config.sources.items()
        if name in once or (source in here and name not in asked)
    )


def for_record(config: Config) -> Config:
    """Return the configuration to record, without the options of a single start."""
    once = options_on_resume(OnResume.ONE_START)
    asked = {name: source for name, source in config.sources.items() if name not in once}
    return dataclasses.replace(config, sources=asked)


def _same_rows(checkpoint: Checkpoint, config: Config) -> dict[str, int]:
    """Return the options with which a step keeps its rows at a changed world size: smaller micro-batches if some devices would
    get none, then gradient accumulation. If the rows cannot be divided evenly, some ranks have one micro-batch fewer."""
    rows = (checkpoint.manifest.identity.get("order") or {}).get("rows_per_step")
    world = num_at_once(config)
    asked = config.batch_size if "batch_size" in config.sources else None
    size = asked or checkpoint.manifest.options.get("batch_size")
    if not rows or not size or "world_size" not in config.sources or config.world_size < 1:
        return {}
    found = {}
    if asked is None:
        found["batch_size"] = size = min(size, -(-rows // world))
    if rows % (size * world):
        return found | {"rows_per_step": rows}
    return found | {"gradient_accumulation_steps": rows // (size * world), "rows_per_step": 0}


def unpack_run(config: Config) -> tuple[Path, dict[str, Any]]:
    """Return the run folder of --resume, unpacked if it is an archive, and the options for its packed files."""
    path = Path(named_run(config.resume, parent=config.output_dir)).expanduser()
    target: dict[str, Any] = {}
    if path.is_file():
        note = read_note(path)
        folder = Path(config.output_dir).expanduser() / (config.name or note["run"])
        if not folder.exists():
            with hold(folder):  # only one of the simultaneous starts unpacks it
                if not folder.exists():
                    unpack_archive(path, folder)
        if read_unpacked_note(folder) != note:
            raise UserError(
                f"{folder} already exists and is not from {path}.",
                do="choose a different --name",
            )
        path, target = folder, {"backend": note["to"]}
    note = read_unpacked_note(path) if path.is_dir() else {}
    files = {option: unpacked_value(path, place) for option, place in (note.get("options") or {}).items()}
    return path, files | target


def unpacked_value(run: Path, place: Any) -> str:
    """Return the value of an option whose files were in the archive."""
    if isinstance(place, str):
        return str(run / place)
    names = [str(run / entry["file"]) if "file" in entry else entry["name"] for entry in place]
    return join_entries(
        [
            DatasetEntry(name=name, weight=entry.get("weight"))
            for name, entry in zip(names, place, strict=True)
        ]
    )


def _is_run(path: Path) -> bool:
    return (path / FOLDER).is_dir() or has_record(path)


def _run_of(path: Path) -> Path:
    return path if (path / FOLDER).is_dir() else find_run(path)


def _newest(root: Path, observer: Observer, *, hashes: bool) -> Checkpoint | None:
    damaged: list[DamagedCheckpoint] = []
    found = newest_valid(root, on_damaged=damaged.append, hashes=hashes)
    for error in damaged:
        observer.on_event(Warned(message=f"skipped: {error.message} {error.why}"))
    if found is None and damaged:
        raise UserError(
            f"None of the {len(damaged)} checkpoints in {root} is intact.",
            why=damaged[0].why,
            do="restore one from a copy, or start over with --resume none --overwrite",
        )
    return found


def pick_checkpoint(path: Path, observer: Observer, *, hashes: bool = True) -> Checkpoint:
    """Return the checkpoint at `path`, or the newest valid one of the run at `path`; warn about damaged ones."""
    if not _is_run(path):
        return open_checkpoint(path.resolve(), hashes=hashes)
    found = _newest(path / FOLDER, observer, hashes=hashes)
    if found is None:
        adapter = f" --base_adapter {path / 'adapter'}" if (path / "adapter").is_dir() else ""
        raise UserError(
            f"{path} has no checkpoint.",
            why="it ran without --save_steps and --save_minutes, and was not stopped.",
            do=f"start a new run with --save_steps N{adapter}",
        )
    return found
