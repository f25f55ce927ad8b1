"""The printed lines of a plan and of an emulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Line
from crosstune.cli.terminal.figures import count, duration, size
from crosstune.config.load import environment_of
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.estimate.memory import describe_parts, num_recomputed, surely_too_large
from crosstune.estimate.step_time import LARGEST_ERROR, NUM_CHECKED
from crosstune.planner.find_fit import flags_text
from crosstune.planner.predict import OwnModel, state_bytes

if TYPE_CHECKING:
    from crosstune.planner.longest import LongestRow
    from crosstune.planner.predict import Prediction
    from crosstune.planner.rehearse import Rehearsed
    from crosstune.runs.check_request import RequestCheck

LABEL_WIDTH = 12
MAX_OPERATORS = 12
"""Operators of each kind to list after an emulation."""
_SOURCES = {
    "config": "its configuration",
    "table": "the bundled table of models",
    "size": "a typical model of this size",
}

Rows = dict[str, str]
"""Title -> text of a row."""


def describe_plan(
    plan: Plan, checked: RequestCheck | None = None, prediction: Prediction | None = None
) -> list[str]:
    """Return the printed lines of a plan."""
    return [text for text, _ in plan_lines(plan, checked, prediction)]


def plan_lines(
    plan: Plan,
    checked: RequestCheck | None = None,
    prediction: Prediction | None = None,
    *,
    priced: bool = False,
) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of a plan with their styles."""
    from crosstune.cli.terminal.output import ERROR, WARNING
    from crosstune.config.recipe_spec import load_recipe

    own = checked.own_model if checked is not None else None
    needs_base = load_recipe(plan.config.recipe).needs_base_model
    if needs_base and (too_large := _too_large(plan)):
        yield f"{'fits':<{LABEL_WIDTH}} {too_large}", ERROR
    rows = _option_rows(plan, checked, needs_base=needs_base)
    rows |= figure_rows(plan, prediction) if needs_base else _own_model_rows(plan, own)
    if priced:
        rows.setdefault("cost", "unknown, because the time is unknown")
    yield from ((f"{name:<{LABEL_WIDTH}} {value}", None) for name, value in rows.items() if value)
    for adjustment in plan.adjustments:
        label = {"change": "changed", "warning": "warning", "name": "read as"}.get(adjustment.kind, "chosen")
        yield (
            f"{label:<{LABEL_WIDTH}} {adjustment.sentence()}",
            WARNING if label in ("changed", "warning") else None,
        )
    if checked is None:
        return
    yield from ((f"{'warning':<{LABEL_WIDTH}} {sentence}", WARNING) for sentence in checked.warnings)
    yield from ((f"{'not checked':<{LABEL_WIDTH}} {sentence}", None) for sentence in checked.not_checked)
    yield from ((f"{'cannot train':<{LABEL_WIDTH}} {problem.message}", ERROR) for problem in checked.problems)


def _option_rows(plan: Plan, checked: RequestCheck | None, *, needs_base: bool) -> Rows:
    """Return the rows for the resolved options; an empty text omits the row."""
    config = plan.config
    device = plan.backend.devices[0].name if plan.backend.devices else plan.backend.device
    quantized = f", {plan.quantizer} base of {plan.n_bits} bits" if plan.quantizer != "none" else ""
    if config.rows_per_step:
        step = f"{config.rows_per_step} rows, {config.batch_size} at a time on each of {plan.world_size}"
    else:
        step = (
            f"{_many(config.batch_size, 'row')} x {_many(config.gradient_accumulation_steps, 'micro-batch', 'es')} x "
            f"{_many(plan.world_size, 'device')}"
        )
    strategy = f", {config.sharding_strategy}" if plan.engine == "torch" else ""
    settings = backend_settings(plan)
    shown = [f"{name}={value}" for name, value in settings["environment"].items()]
    if every := settings["clear_cache_every"]:
        shown.append(f"cache cleared {'after every step' if every == 1 else f'every {every} steps'}")
    shown += ["batches copied from pinned memory"] * settings["pinned_memory"]
    return {
        "machine": plan.machine.name,
        "backend": f"{plan.backend.name} ({plan.engine} engine), {plan.world_size} x {device}",
        "model": config.model_name if needs_base else f"built by the {config.recipe} recipe",
        "data": _data(config, checked),
        "method": f"{config.recipe} / {plan.method}{quantized}",
        "precision": plan.precision,
        "attention": ": ".join(plan.attention),
        "layers": _layers(plan),
        "step": step,
        "length": _length(config),
        "optimizer": f"{config.optimizer}, lr {config.lr:g} {config.lr_scheduler}, wd {config.wd:g}",
        "collectives": f"{plan.collective}{strategy}" if plan.collective else "",
        "settings": ", ".join(shown),
    }


def _data(config: Config, checked: RequestCheck | None) -> str:
    is_demo = "dataset" not in config.sources and config.recipe == "sft"
    hint = " (the bundled demo data; pass your own with --dataset)" if is_demo else ""
    data = checked.data if checked is not None else None
    if checked is not None and checked.own_model is not None:
        data = checked.own_model.data
    if data is None:
        return f"{config.dataset}{hint}, assuming full rows of {config.context_length} tokens"
    if data.is_rough:
        return (
            f"{config.dataset}, {_many(data.num_rows, 'row')}, at most about {data.tokens_per_row:.0f} tokens on average and "
            f"{data.longest_row} in the longest (counted without the model's tokenizer)"
        )
    return (
        f"{config.dataset}{hint}, {data.num_rows:,} rows of {data.tokens_per_row:.0f} tokens on average, at most "
        f"{data.longest_row}"
    )


def _layers(plan: Plan) -> str:
    """Describe the decoder layers; return an empty string if there is no choice."""
    if plan.engine != "torch" or plan.config.recipe == "latent_diffusion":
        return ""
    if plan.config.kernels != "fast":
        return "general, from transformers"
    saving, fitted = "", plan.fitted
    if fitted is not None and (recomputed := num_recomputed(fitted.shape, fitted.step)):
        saving = f"; {recomputed} of {fitted.shape.num_layers} are recomputed to save memory"
    return f"fast: fused layers for adapters on a frozen base{saving}"


def _many(number: int, what: str, plural: str = "s") -> str:
    return f"{number:,} {what}{plural * (number != 1)}"


def _length(config: Config) -> str:
    """Describe when the run ends."""
    steps = f"{config.max_steps:,} step{'s' * (config.max_steps != 1)}"
    if not config.num_epochs and config.max_steps != -1:
        return f"{steps}, regardless of the size of the data"
    epochs = f"{config.num_epochs:g} epoch{'s' * (config.num_epochs != 1)} of the data"
    return epochs if config.max_steps == -1 else f"{epochs}, at most {steps}"


def backend_settings(plan: Plan) -> dict[str, Any]:
    """Return the settings that the backend applies to a run."""
    spec = backend_specs()[plan.backend.name]
    return {
        "environment": environment_of(spec, system=plan.machine.system),
        "clear_cache_every": spec.cache_interval(low_memory=plan.config.low_memory),
        "pinned_memory": spec.pinned_memory,
    }


def figure_rows(plan: Plan, prediction: Prediction | None) -> Rows:
    """Return the rows for parameters, memory, time and cost; without a prediction, only memory."""
    if plan.fitted is None:
        why = f"{plan.config.model_name} is not on this machine, and its sizes are not in the bundled table"
        return {"memory": f"unknown: {why}; train reads them from the model"}
    if prediction is None:
        return {"memory": _memory(plan)}
    share = 100 * prediction.trained / prediction.parameters
    trained = f"{count(prediction.trained)} trained ({share:.3g} %)"
    names = {} if plan.fitted.step.method in ("lora", "dora") else {"adapters": "fp32 copies"}
    parts = describe_parts(prediction.memory).items()
    rows = {
        "parameters": f"{count(prediction.parameters)}, {trained}; sizes from {_SOURCES[prediction.source]}",
        "memory": _memory(plan),
        "of which": ", ".join(f"{names.get(name, name)} {size(part)}" for name, part in parts),
    }
    if (phase := prediction.generation) is not None:
        time = f", about {duration(phase.seconds)}" if phase.seconds is not None else ""
        rows["generation"] = (
            f"{phase.num_answers:,} answers, at most {count(phase.num_tokens)} tokens a step on each device: {phase.num_rows:,} at "
            f"once, with a cache of {size(phase.cache_bytes)}, which is freed before training{time}"
        )
    if (fit := prediction.fit) is not None:
        rows["would fit"] = f"with {fit.text}"
        rows |= {"command": fit.command} if fit.command else {}
    if (too_large := _too_large(plan)) and too_large.startswith("no"):
        return rows | {"speed": "not predicted, because the step does not fit"}
    return rows | _time_rows(prediction)


def _too_large(plan: Plan) -> str:
    """Say that the step needs too much memory; return an empty string if it fits or its memory is unknown."""
    need, usable = plan.estimated_bytes, plan.usable_bytes
    if need is None or not usable or need <= usable:
        return ""
    sure = "no" if surely_too_large(need, usable) else "perhaps not"
    return f"{sure}: a step needs about {size(need)}, and {size(usable)} can be used"


def _memory(plan: Plan) -> str:
    assert plan.estimated_bytes is not None
    learned = ""
    if plan.correction is not None:
        runs = plan.correction.num_runs
        learned = f", corrected by {runs} earlier run{'s' * (runs != 1)} (x {plan.correction.factor:.2f})"
    each = " on each device" if plan.world_size > 1 else ""
    return (
        f"about {size(plan.estimated_bytes)} for a full step{each} (estimated{learned}), of {size(plan.usable_bytes)} to "
        f"use (the device has {size(plan.backend.memory_total_bytes)})"
    )


def _time_rows(prediction: Prediction) -> Rows:
    time, cluster = prediction.time, prediction.cluster
    rows = {} if prediction.num_steps is None else {"steps": f"{prediction.num_steps:,}"}
    if time is None:
        return rows | {"time": "unknown for this device; the first steps of a run show it"}
    step = f"{1000 * time.seconds:.0f} ms" if time.seconds < 10 else duration(time.seconds)
    rows["speed"] = (
        f"about {time.tokens_per_s:,.0f} tok/s, {step} per step, mostly {time.limit} (predicted; at most "
        f"{100 * LARGEST_ERROR:.0f} % off on {NUM_CHECKED} measured runs of a 7B model on an H200; not checked elsewhere)"
    )
    if cluster.size > 1:
        rows["processes"] = (
            f"{cluster.num_nodes} x {cluster.num_local}, {cluster.sharding}: communication in "
            f"{100 * time.communication_share:.1f} % of the time, {100 * time.communication_s / time.seconds:.1f} % "
            "not overlapped with computation (predicted, not verified on multiple devices)"
        )
    if prediction.hours is None:
        return rows | {"time": "unknown: the number of steps is unknown; --max_steps sets it"}
    rows["time"] = f"about {duration(3600 * prediction.hours)} for all steps"
    if prediction.cost is not None:
        several = cluster.num_nodes > 1
        machines = f"{cluster.num_nodes:,} machines" if several else "the machine"
        price = f"{prediction.price_per_hour:g} an hour{' each' * several}"
        rows["cost"] = f"about {prediction.cost:,.2f} for {machines} at {price}"
    return rows


def longest_line(longest: LongestRow | None) -> str:
    """Return the line of the longest row that fits."""
    if longest is None:
        return f"{'longest':<{LABEL_WIDTH}} unknown, because the sizes of the model are unknown"
    text = f"{longest.as_planned:,} tokens in one row" if longest.as_planned else "no row fits as planned"
    if longest.options:
        text += f"; {longest.with_savings:,} with {flags_text(longest.options)}"
    trained = longest.trained_context
    if trained is not None and max(longest.as_planned, longest.with_savings) > trained:
        text += f"; the model's positions end at {trained:,}{' as scaled' * longest.is_scaled}"
        if not longest.is_scaled:
            factor = -(-max(longest.as_planned, longest.with_savings) // trained)
            text += f", and longer rows need --rope_scaling, such as yarn with --rope_factor {factor}"
    return f"{'longest':<{LABEL_WIDTH}} {text}"


def rehearsal_lines(plan: Plan, rehearsed: Rehearsed) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of a rehearsal: counts beside predictions, and the time computed from them."""
    counted, fitted, time = rehearsed.counted, plan.fitted, rehearsed.time
    assert fitted is not None
    parts = fitted.parts
    predicted = {
        "weights": (counted.weights, parts.weights + parts.adapters),
        "gradients": (counted.gradients, parts.gradients),
        "optimizer": (counted.optimizer, parts.optimizer),
        "activations": (counted.activations, parts.activations),
        "peak": (counted.peak, parts.total - parts.overhead),
    }
    rows: Rows = {
        "rehearsed": f"a step of rank 0 of {counted.num_ranks:,}, without values: {count(counted.parameters)} parameters",
        "counted": ", ".join(
            f"{name} {size(found)} ({size(other)} predicted)" for name, (found, other) in predicted.items()
        ),
        "sent": ", ".join(
            f"{times:,} x {kind} ({size(num_bytes)})" for kind, (times, num_bytes) in counted.totals().items()
        ),
    }
    if time is not None:
        step = f"{1000 * time.seconds:.0f} ms" if time.seconds < 10 else duration(time.seconds)
        rows["computed"] = (
            f"{step} per step, {time.tokens_per_s:,.0f} tok/s, {time.tokens_per_s / counted.num_ranks:,.0f} on each device, mostly "
            f"{time.limit}; {100 * time.communication_share:.1f} % communication, "
            f"{100 * time.communication_s / time.seconds:.1f} % not overlapped (from the rates of links, not measured)"
        )
    yield from ((f"{name:<{LABEL_WIDTH}} {value}", None) for name, value in rows.items())


def _own_model_rows(plan: Plan, own: OwnModel | None) -> Rows:
    """Return the rows of a run whose recipe builds its own model."""
    rows: Rows = {}
    if own is None or own.parameters is None:
        known = "once its data is read" if own is None else "after its first step"
        why = f"the {plan.config.recipe} recipe builds its own model, whose size is known {known}"
        rows["memory"] = f"unknown: {why}"
    else:
        rows["parameters"] = f"{count(own.parameters)}, built by the recipe for this data"
        state, parts = state_bytes(plan, own.parameters), own.step_bytes(plan)
        usable = f"of {size(plan.usable_bytes)} to use"
        if parts is None:
            rows["memory"] = (
                f"{size(state)} for weights, gradients and optimizer, {usable}; unknown: the activations of "
                f"{plan.config.batch_size} rows"
            )
        else:
            rows["memory"] = f"about {size(sum(parts.values()))} for a full step (estimated), {usable}"
            rows["of which"] = (
                f"activations of {plan.config.batch_size} rows {size(parts['activations'])}, "
                f"weights, gradients and optimizer {size(state)}, overhead {size(parts['overhead'])}"
            )
        if (fit := own.find_fit(plan)) is not None:
            rows["would fit"] = f"with {fit.text}"
            rows |= {"command": fit.command} if fit.command else {}
    if own is not None and own.data is not None:
        rows["steps"] = f"{own.data.num_steps:,}"
    rows["time"] = "unknown: speed is predicted only for language models; the first steps of a run show it"
    return rows


def verdict_lines(report: Mapping[str, Any]) -> Iterator[Line]:
    title, num_steps = report["title"], len(report["losses"])
    answers = f", an evaluation with {report['num_answers']} answers" if report["evaluated"] else ""
    yield f"emulated     {title} on this CPU, as {report['machine']} would run it"
    yield (
        f"checked      {num_steps} step{'s' * (num_steps != 1)}{answers} and a checkpoint in "
        f"{duration(report['seconds'])}: {report['operators']} operators, {report['calls']:,} calls, against the operator "
        f"table of torch {report['torch']}"
    )
    yield f"verdict      {report['verdict']}", "green" if report["works"] else "bold red"
    for label, rows, template in (
        ("refused", report["refused"], f"returns {{what}}, unsupported on {title}"),
        ("fails", report["failing"], f"has no {title} kernel, and {{what}}"),
        ("slow", report["fallen_back"], f"has no {title} kernel; {{what}}"),
        ("custom", report["custom_operators"], "{what}"),
    ):
        for row in rows[:MAX_OPERATORS]:
            calls = f"{row['calls']:,} call{'s' * (row['calls'] != 1)}"
            said = template.format(what=row["what"])
            yield f"{label:<{LABEL_WIDTH}} {row['operator']} {said}; {calls}, first at {row['where']}"
        if len(rows) > MAX_OPERATORS:
            yield f"{label:<{LABEL_WIDTH}} and {len(rows) - MAX_OPERATORS} more; --json lists all"
    yield from (f"condition    {sentence}" for sentence in report["conditions"])
    yield from (f"not checked  {sentence}" for sentence in report["not_checked"])
