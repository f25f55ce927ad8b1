"""Pack a run into an archive to continue it on a different machine, after measuring its loss."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.checkpoint.archive import DATA_OPTIONS, PACKED_OPTIONS, SUFFIX, write_archive
from crosstune.checkpoint.folders import FOLDER
from crosstune.checkpoint.manifest import MANIFEST, SEAL
from crosstune.checkpoint.read import Checkpoint, find_run
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.core.events import LossCompared, LossMeasured, Observer, Warned
from crosstune.core.loss_measurement import Comparison, LossMeasurement
from crosstune.core.names import unknown_name
from crosstune.core.protocols import HasPictures, Recipe
from crosstune.core.weights import result_weights
from crosstune.data.read.dataset_list import parse_dataset
from crosstune.files.outputs import check_output
from crosstune.files.run_record import REFERENCE
from crosstune.machines.probe import load_machine, probe_machine, typical_machine
from crosstune.models.adapter_files import TOKENIZER_FILES
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_base, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.restore import (
    check_loss_change,
    check_same_model,
    compare_losses,
    measure_loss,
    restored_config,
)
from crosstune.runs.resume import FIRST_ADAPTER, pick_checkpoint
from crosstune.runs.resume_identity import check_same, compare, identity_of

DATA_LIMIT = 1_000_000_000
_KEPT = ("config.yaml", "plan.json", "metrics.jsonl", "events.jsonl", REFERENCE)
"""Files of the run folder in the archive, if present: its logs, and the log probabilities of a reference or teacher."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """A run opened on one backend."""

    plan: Plan
    model: ModelFolder | None
    recipe: Recipe


def move(
    run: Path,
    *,
    to: str,
    observer: Observer,
    out: Path | None = None,
    machine: str | None = None,
    with_data: bool = True,
    force: bool = False,
    model_name: str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Check a run, measure its loss to compare after the move, and write the archive."""
    if to not in backend_specs():
        raise unknown_name("backend", to, backend_specs())
    if out is not None:
        check_output(out, option="out", overwrite=overwrite, streams=False, makes_folder=True)
    checkpoint = pick_checkpoint(run, observer)
    home = find_run(checkpoint.folder)
    out = out or home.with_name(f"{home.name}-step{checkpoint.step}-{to}{SUFFIX}")
    trained_on = str(checkpoint.manifest.backend)
    here = _open_side(checkpoint, _local_backend(trained_on, observer), observer, model_name)
    _check_training(checkpoint, here)
    if with_data and isinstance(here.recipe, HasPictures) and here.recipe.most_patches():
        with_data = False
        observer.on_event(Warned(message=_PICTURES_STAY))
    files, options = pack_files(here.plan.config, with_data=with_data)
    members = _members(checkpoint, home, files)
    check_output(
        out, option="out", inputs=[*members.values()], overwrite=overwrite, streams=False, makes_folder=True
    )
    measured = _measure(checkpoint, here)
    observer.on_event(LossMeasured(measured=measured))
    there = _plan_target(checkpoint, to, machine, model_name)
    for adjustment in there.adjustments:
        observer.on_event(adjustment.to_event())
    compared = _compare_locally(checkpoint, measured, to, observer, model_name)
    if compared is not None:
        check_loss_change(compared, allowed=force, flag="--force")
    model = checkpoint.manifest.identity.get("model")
    facts = {
        "step": checkpoint.step,
        "to": to,
        "measured": measured.to_json(),
        "compared": compared.to_json() if compared is not None else None,
    }
    note = facts | {
        "version": 1,
        "run": home.name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "options": options,
    }
    num_bytes = write_archive(out, members, note)
    return facts | {
        "path": str(out),
        "bytes": num_bytes,
        "from": trained_on,
        "machine": there.machine.name,
        "assumed_machine": machine is None,
        "model_name": model_name,
        "processes": int(checkpoint.manifest.options.get("world_size", 1)),
        "changes": [a.sentence() for a in there.adjustments if a.kind == "change"],
        "model": model if here.model is not None else None,
        "data": sorted(options),
    }


def _open_side(checkpoint: Checkpoint, backend: str, observer: Observer, model_name: str | None) -> Side:
    plan = make_plan(restored_config(checkpoint, backend=backend, model_name=model_name))
    model = find_base(plan.config, checkpoint, observer)
    check_same_model(checkpoint, model)
    plan = make_plan(plan.config, machine=plan.machine, base=checkpoint.manifest.base_choice)
    return Side(plan=plan, model=model, recipe=open_recipe(plan.config, model, observer))


def _local_backend(trained_on: str, observer: Observer) -> str:
    """Return the run's backend if this machine has it, otherwise "auto"."""
    if trained_on in probe_machine(backends=[trained_on]).available():
        return trained_on
    message = f"this machine lacks {trained_on}, the run's backend: the effect of the move is not measured"
    observer.on_event(Warned(message=message))
    return "auto"


def _check_training(checkpoint: Checkpoint, side: Side) -> None:
    differences = compare(checkpoint.manifest.identity, identity_of(side.plan, side.model, side.recipe))
    moved = side.plan.backend.name != checkpoint.manifest.backend
    expected = ("quantization", "optimizer") if moved else ()
    refused = [d for d in differences if d.kind not in expected]
    do = "restore the model, data and options of the run"
    check_same(refused, checkpoint.manifest, side.plan.config, do=do)


def _measure(checkpoint: Checkpoint, side: Side, *, like: LossMeasurement | None = None) -> LossMeasurement:
    session = open_session(side.plan, side.model, task=side.recipe.task(side.plan.engine))
    session.import_weights(result_weights(checkpoint.load()))
    measured = measure_loss(session, side.recipe, side.plan, step=checkpoint.step, like=like)
    del session
    gc.collect()  # a model has reference cycles, and the next one needs its memory
    return measured


def _plan_target(checkpoint: Checkpoint, to: str, machine: str | None, model_name: str | None) -> Plan:
    """Plan the run for the named machine, or for a typical machine with the backend."""
    config = restored_config(checkpoint, backend=to, model_name=model_name)
    if machine is None:
        return make_plan(config, machine=typical_machine(to))
    named = load_machine(machine)
    if to not in named.available():
        raise UserError(
            f"The machine {machine} does not have the backend {to}.",
            do="choose a different --machine or --to",
        )
    return make_plan(config, machine=named)


def _compare_locally(
    checkpoint: Checkpoint,
    measured: LossMeasurement,
    to: str,
    observer: Observer,
    model_name: str | None,
) -> Comparison | None:
    """Measure the same batches on the target backend, if this machine has it."""
    if to == measured.backend or to not in probe_machine(backends=[to]).available():
        return None
    side = _open_side(checkpoint, to, observer, model_name)
    found = compare_losses(measured, _measure(checkpoint, side, like=measured))
    observer.on_event(LossCompared(comparison=found))
    return found


def _members(checkpoint: Checkpoint, home: Path, files: Mapping[str, Path]) -> dict[str, Path]:
    members = {name: home / name for name in _KEPT if (home / name).is_file()}
    first = home / FIRST_ADAPTER
    members |= {f"{FIRST_ADAPTER}/{path.name}": path for path in sorted(first.glob("*")) if path.is_file()}
    for name in sorted([MANIFEST, SEAL, *checkpoint.manifest.files]):
        members[f"{FOLDER}/{checkpoint.folder.name}/{name}"] = checkpoint.folder / name
    return members | {f"data/{name}": path for name, path in files.items()}


_PICTURES_STAY = (
    "the data is not in the archive, since its pictures are files next to it: copy its folder to the other machine, and "
    "name it there with --dataset"
)


def pack_files(config: Config, *, with_data: bool) -> tuple[dict[str, Path], dict[str, Any]]:
    """Return the local files of the options by their names in the folder `data` of the archive; and by option the place of its
    file or folder, or a list with an entry per data source. Hub and bundled data are not included."""
    files: dict[str, Path] = {}
    options: dict[str, Any] = {}
    for option in PACKED_OPTIONS:
        value = getattr(config, option)
        if not value or (option in DATA_OPTIONS and not with_data):
            continue
        names = parse_dataset(value) if option in DATA_OPTIONS else []
        if len(names) > 1:
            options[option] = []
            for number, entry in enumerate(names, start=1):
                found = _files(entry.name, prefix=f"{option}-{number}")
                files |= found
                place = {"file": _place(found)} if found else {"name": entry.name}
                options[option].append(place | {"weight": entry.weight})
            continue
        found = _files(names[0].name if names else value, prefix=option)
        files |= found
        options |= {option: _place(found)} if found else {}
    return files, options


def _files(name: str, *, prefix: str) -> dict[str, Path]:
    path = Path(name).expanduser()
    if not path.exists():
        return {}
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    if prefix == "tokenizer":  # the folder may contain a whole model
        files = [file for file in files if file.name in TOKENIZER_FILES and file.parent == path]
    total = sum(file.stat().st_size for file in files)
    if total > DATA_LIMIT:
        raise UserError(
            f"The data in {path} is too large for the archive ({total / 1e9:.1f} GB).",
            do="pass --without_data, and specify the data with --dataset on the other machine",
        )
    return {f"{prefix}-{file.relative_to(path.parent).as_posix()}": file for file in files}


def _place(files: Mapping[str, Path]) -> str:
    return f"data/{Path(next(iter(files))).parts[0]}"
