"""Plan a run for a different device, run a few steps of it on this CPU, and report what the device does not support."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from types import ModuleType
from typing import Any

from crosstune.config.load import environment_of
from crosstune.config.options.hardware import EMULATED_PACKAGE
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError, naming
from crosstune.core.events import Loaded, Loading, Observer, Observers
from crosstune.core.names import load_plugin
from crosstune.core.protocols import Evaluation, Recipe
from crosstune.core.quantization import read_quantizers
from crosstune.loop.step import prepare_window, take_step
from crosstune.machines.probe import load_machine
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.resume import read_request

NUM_STEPS = 3
MAX_ROWS, MAX_EVALUATED, MAX_NEW_TOKENS = 2, 4, 8
"""The set of operators does not depend on the number of rows; two cover batching and gradient accumulation."""


def emulate(
    config: Config, *, machine: str | None = None, observers: Sequence[Observer] = ()
) -> tuple[Plan, dict[str, Any]]:
    """Load the model, evaluate, take a few steps and export the state on the CPU; record every operator. Write nothing.

    Return the plan for the target machine and a report. Its rows are operators: `operator`, `where` it was called first,
    `what` the device does with it, and its number of `calls`.
    """
    name = config.emulate
    assert name is not None
    screen = Observers(list(observers))
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            f"--emulate {name} needs torch on this computer.", do="pip install 'crosstune[torch]'"
        )
    device = load_plugin(EMULATED_PACKAGE, name, kind="emulated backend")
    if config.backend not in ("auto", device.BACKEND):
        raise UserError(
            f"--emulate {name} cannot be combined with --backend {config.backend}.",
            do=f"remove --backend, or use --backend {device.BACKEND}",
        )
    config = replace(config, backend=device.BACKEND, sources={**config.sources, "backend": "--emulate"})
    config, _ = read_request(config, observer=screen, hashes=False)
    there = load_machine(machine or device.MACHINE)
    plan = make_plan(config, machine=there)
    _check_quantizer(plan)
    with naming("model_name"):
        model = find_model(plan.config, screen)
    recipe = open_recipe(_shorten(plan).config, model, screen)
    plan = make_plan(config, machine=there, longest_row=recipe.longest_row())
    for adjustment in plan.adjustments:
        screen.on_event(adjustment.to_event())
    recipe.configure(_shorten(plan).config)
    environment = environment_of(backend_specs()[device.BACKEND])
    watch = importlib.import_module("crosstune.emulate.watch").Watch(
        name, quantizer=plan.quantizer, environment=environment
    )
    tried = _run(_shorten(plan), model, recipe, watch, screen)
    return plan, _report(name, device, plan, watch) | tried


def _run(plan: Plan, model: ModelFolder, recipe: Recipe, watch: Any, screen: Observers) -> dict[str, Any]:
    """Run the shortened plan on this CPU."""
    started = time.perf_counter()
    screen.on_event(Loading(model=model.name))
    session: Any = open_session(plan, model, task=recipe.task(plan.engine))
    watch.check_loaded(session)
    trained, total = session.num_parameters()
    screen.on_event(
        Loaded(
            name=None,
            backend=plan.backend.name,
            engine=plan.engine,
            checkpoint=None,
            result=None,
            trained_parameters=trained,
            parameters=total,
        )
    )
    evaluation = Evaluation(metrics={})
    if not plan.config.skip_eval:
        with watch.during("evaluation"):
            evaluation = recipe.evaluate(session, observer=screen)
    losses = []
    for step in range(recipe.num_steps()):
        with watch.during(f"step {step + 1}"):
            window = prepare_window(session, recipe.micro_batches(step))
            losses.append(take_step(session, window, lr=plan.config.lr).loss)
    with watch.during("checkpoint"):
        session.export_state()
    return {
        "losses": losses,
        "evaluated": bool(evaluation.metrics),
        "num_answers": len(evaluation.samples),
        "seconds": time.perf_counter() - started,
    }


def _report(name: str, device: ModuleType, plan: Plan, watch: Any) -> dict[str, Any]:
    conditions = [text for dtype, text in device.CONDITIONS.items() if dtype in watch.dtypes]
    odd = sorted(str(dtype) for dtype in watch.dtypes - device.TESTED - device.REFUSED)
    conditions += [f"{dtype} is not among the dtypes that torch tests on {device.TITLE}" for dtype in odd]
    failing, fallen_back, custom = (
        sorted(found.values(), key=lambda row: -row["calls"])
        for found in (watch.failing, watch.fallen_back, watch.custom)
    )
    refused = list(watch.refused.values())  # in order: the first may cause the others
    slow = f", {len(fallen_back)} of its operators on the CPU" if fallen_back else ""
    verdict = f"this run should work on {device.TITLE}{slow}"
    if first := next(iter((*refused, *failing)), None):
        kind = f" in {first['what']}" if refused else f", {first['what']}"
        verdict = f"this run will not work on {device.TITLE}: {first['operator']}{kind} at {first['where']}"
    return {
        "emulated": name,
        "title": device.TITLE,
        "machine": plan.machine.name,
        "works": first is None,
        "verdict": verdict,
        "operators": len(watch.operators),
        "calls": sum(watch.operators.values()),
        "refused": refused,
        "failing": failing,
        "fallen_back": fallen_back,
        "custom_operators": custom,
        "conditions": conditions,
        "not_checked": list(device.NOT_CHECKED),
        "torch": version("torch"),
    }


def _shorten(plan: Plan) -> Plan:
    """Return the plan for this CPU, with the fewest rows, steps and tokens that run every part."""
    config = plan.config
    steps = min(NUM_STEPS, config.max_steps) if config.max_steps > 0 else NUM_STEPS
    batch = min(config.batch_size, MAX_ROWS)
    accumulation = min(config.gradient_accumulation_steps, MAX_ROWS)
    # Without evaluation data, a tenth of the rows is held out.
    rows = max(steps * batch * accumulation, 10 * MAX_EVALUATED)
    short = replace(
        config,
        max_steps=steps,
        num_epochs=0,
        batch_size=batch,
        gradient_accumulation_steps=accumulation,
        rows_per_step=0,
        dataset_samples=rows if config.dataset_samples == -1 else min(rows, config.dataset_samples),
        eval_samples=min(config.eval_samples, MAX_EVALUATED),
        num_samples=min(max(config.num_samples, 1), MAX_ROWS),
        max_new_tokens=min(config.max_new_tokens, MAX_NEW_TOKENS),
    )
    return replace(plan, config=short, backend=replace(plan.backend, device="cpu"))


def _check_quantizer(plan: Plan) -> None:
    if plan.quantizer == "none":
        return
    quantizer = read_quantizers()[plan.quantizer]
    if importlib.util.find_spec(quantizer.library.partition(".")[0]) is None:
        raise UserError(
            f"The plan for {plan.machine.name} quantizes with {plan.quantizer}, which is not installed on this machine.",
            do=f"{quantizer.install_command}, or choose a different --quantization_backend",
        )
