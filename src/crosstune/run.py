"""The one place that wires configuration, backend, engine, recipe and loop into a run."""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

from crosstune.config.load import add_environment, cache_override, to_yaml
from crosstune.config.plan import TRAIN_TYPE_PARTS, Plan
from crosstune.config.resolve import resolve
from crosstune.config.schema import Config
from crosstune.config.unbuilt import unbuilt
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError, raise_all
from crosstune.core.machine import Machine
from crosstune.core.names import load_plugin
from crosstune.core.protocols import Observer, Observers, Recipe, Session
from crosstune.core.record import RunRecord, holds_run, move_aside
from crosstune.loop.stop import StopSignal
from crosstune.loop.train import Progress
from crosstune.loop.train import train as run_loop
from crosstune.machines import probe_machine
from crosstune.models.locate import ModelFolder, identity, locate, shape

ALL_QUANTIZERS = ("bnb", "hqq", "quanto", "mlx")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    folder: Path
    summary: dict[str, Any]


def make_plan(config: Config, *, machine: Machine | None = None, longest_row: int | None = None) -> Plan:
    """What `train` would do with this configuration, here or on another machine."""
    specs = backend_specs()
    if machine is None:
        machine = _probe_for(config)
    return resolve(
        config,
        machine=machine,
        collectives={name: spec.collective for name, spec in specs.items()},
        preference=list(specs),
        shape=shape(config.model_name, cache=cache_override()),
        longest_row=longest_row,
    )


def train(
    config: Config, *, observers: Sequence[Observer] = (), command: Sequence[str] | None = None
) -> RunResult:
    """Train as configured. Everything that can be wrong with the request is found before the run folder is made."""
    screen = Observers(list(observers))
    plan = make_plan(config)
    raise_all(unbuilt(plan))
    folder = run_folder(config)
    if holds_run(folder) and config.overwrite:
        screen.on_event("moved_aside", {"path": str(move_aside(folder))})
    check_folder_free(folder)
    model = find_model(plan.config, screen)
    recipe = open_recipe(plan.config, model)
    plan = make_plan(config, machine=plan.machine, longest_row=recipe.longest_row())
    recipe.configure(plan.config)
    for adjustment in plan.adjustments:
        screen.on_event("adjustment", adjustment.to_event())
    if recipe.num_steps() == 0:
        raise UserError(
            "There is no step to run.", why="the data set and --num_epochs add up to less than one."
        )
    described = describe_run(plan, folder=folder, model=model, recipe=recipe, command=command)
    record = RunRecord.create(folder, config_yaml=to_yaml(config), plan=described)
    observer = Observers([record, screen])
    for adjustment in plan.adjustments:
        record.on_event("adjustment", adjustment.to_event())
    observer.on_event(
        "start", {"folder": str(folder), "data": recipe.describe(), "num_steps": recipe.num_steps()}
    )
    progress = Progress()
    extra: dict[str, Any] = {"name": folder.name, "backend": plan.backend.name, "engine": plan.engine}
    started = time.perf_counter()
    try:
        _run(plan, recipe, model, folder, observer=observer, progress=progress, extra=extra)
    except BaseException as error:
        # Whatever ends the run, what it did until then stays on record; the error goes on to the caller.
        progress.status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        extra["error"] = f"{type(error).__name__}: {error}"
        record.on_event(progress.status, {"error": extra["error"], "step": progress.steps})
        raise
    finally:
        extra["seconds"] = time.perf_counter() - started
        record.finish(progress.summary() | extra)
    return RunResult(folder=folder, summary=progress.summary() | extra)


def _run(
    plan: Plan,
    recipe: Recipe,
    model: ModelFolder,
    folder: Path,
    *,
    observer: Observer,
    progress: Progress,
    extra: dict[str, Any],
) -> None:
    stop = StopSignal()
    with stop.listening():
        observer.on_event("loading", {"model": model.name, "path": str(model.path)})
        with stop.droppable():
            session = open_session(plan, model)
        extra["trained_parameters"], extra["parameters"] = session.num_parameters()
        observer.on_event("loaded", dict(extra))
        run_loop(session, recipe, config=plan.config, observer=observer, stop=stop, progress=progress)
        extra["checkpoint"] = extra["result"] = None
        if plan.config.save_model and progress.steps:
            extra["result"] = str(session.save_result(folder))
            observer.on_event("saved", {"path": extra["result"], "step": progress.steps})


def open_session(plan: Plan, model: ModelFolder, **options: Any) -> Session:
    add_environment(backend_specs()[plan.backend.name].environment)
    hub_id = model.name if model.source == "hub" else None
    return _engine(plan).open_session(plan, model_folder=model.path, base_name=hub_id, **options)


def open_recipe(config: Config, model: ModelFolder) -> Recipe:
    module = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    return module.open_recipe(config, model_folder=model.path)


def find_model(config: Config, observer: Observer) -> ModelFolder:
    def show(stage: str, done: int, total: int | None) -> None:
        observer.on_event(
            "model_progress", {"stage": stage, "done": done, "total": total, "model": config.model_name}
        )

    return locate(config.model_name, cache=cache_override(), progress=show)


def run_folder(config: Config) -> Path:
    name = config.name
    if name is None:
        model = Path(config.model_name.rstrip("/")).name
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{model}"
    elif not name or Path(name).name != name or name in (".", ".."):
        raise UserError(
            f"'{name}' cannot be the name of a run.", do="use a plain folder name; --output_dir says where"
        )
    return Path(config.output_dir).expanduser() / name


def check_folder_free(folder: Path) -> None:
    if holds_run(folder):
        raise UserError(
            f"{folder} already holds a run.",
            why="a new run there would mix its records with the old one's.",
            do="choose another --name, or pass --overwrite to move the old run aside first",
        )


def describe_run(
    plan: Plan, *, folder: Path, model: ModelFolder, recipe: Recipe, command: Sequence[str] | None
) -> dict[str, Any]:
    """The contents of plan.json."""
    return plan.to_json() | {
        "name": folder.name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": list(command) if command is not None else None,
        "num_steps": recipe.num_steps(),
        "model": dataclasses.asdict(model) | {"path": str(model.path), "identity": identity(model.path)},
        "data": recipe.describe(),
    }


def _engine(plan: Plan) -> ModuleType:
    return importlib.import_module(f"crosstune.{plan.engine}_engine.session")


def _probe_for(config: Config) -> Machine:
    """This machine, as far as the request needs it; all of it when the backend asked for is not there."""
    quantizers = ALL_QUANTIZERS if _wants_quantizer(config) else ()
    if config.backend != "auto":
        machine = probe_machine(backends=[config.backend], quantizers=quantizers)
        if machine.available():
            return machine
    return probe_machine(quantizers=quantizers)


def _wants_quantizer(config: Config) -> bool:
    return TRAIN_TYPE_PARTS[config.train_type][1] != "none" or config.quantization_backend not in (
        "auto",
        "none",
    )
