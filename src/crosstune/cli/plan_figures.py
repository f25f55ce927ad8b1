"""Format the predictions of a plan as rows: parameters, memory by part, steps, speed, time and cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crosstune.cli.units import count, duration, size
from crosstune.config.plan import Plan
from crosstune.core.memory import describe_parts
from crosstune.core.step_time import LARGEST_ERROR, NUM_CHECKED
from crosstune.planner.own_model import OwnModel, state_bytes

if TYPE_CHECKING:
    from crosstune.planner.predict import Prediction

_SOURCES = {
    "config": "its configuration",
    "table": "the bundled table of models",
    "size": "a typical model of this size",
}
_COST_UNKNOWN = ("cost", "not known, because the time is not known")


def figure_rows(plan: Plan, prediction: Prediction | None) -> list[tuple[str, str]]:
    """Return title and text of each row; without a prediction, the memory alone."""
    if plan.fitted is None:
        return [("memory", _unknown(plan))]
    if prediction is None:
        return [("memory", _memory(plan))]
    share = 100 * prediction.trained / prediction.parameters
    rows = [
        (
            "parameters",
            f"{count(prediction.parameters)}, {count(prediction.trained)} trained ({share:.3g} %); "
            f"sizes from {_SOURCES[prediction.source]}",
        ),
        ("memory", _memory(plan)),
        ("of which", ", ".join(f"{name} {size(b)}" for name, b in _parts(plan, prediction).items())),
    ]
    if prediction.change is not None:
        rows.append(("would fit", f"with {prediction.change}"))
    return [*rows, *_time_rows(prediction)]


def own_model_rows(plan: Plan, own: OwnModel | None, *, priced: bool) -> list[tuple[str, str]]:
    """Return the rows of a run whose recipe builds its own model."""
    recipe = plan.config.recipe
    rows: list[tuple[str, str]] = []
    if own is None or own.parameters is None:
        size_from = "is known once its data is read" if own is None else "is known after its first step"
        rows.append(
            ("memory", f"not known: the size of the model that the recipe {recipe} builds {size_from}")
        )
    else:
        state = size(state_bytes(plan, own.parameters))
        rows.append(("parameters", f"{count(own.parameters)}, as the recipe builds them for this data"))
        rows.append(
            (
                "memory",
                f"{state} for weights, gradients and optimizer, of {size(plan.usable_bytes)} to use; not known: the "
                f"activations of {plan.config.batch_size} rows, which are predicted only for language models",
            )
        )
    if own is not None and own.data is not None:
        rows.append(("steps", f"{own.data.num_steps:,}"))
    rows.append(
        ("time", "not known: speed is predicted only for language models; the first steps of a run show it")
    )
    return [*rows, *([_COST_UNKNOWN] if priced else [])]


def _parts(plan: Plan, prediction: Prediction) -> dict[str, int]:
    """Return the parts of the memory, largest first. Without adapters, that part is fp32 copies of the weights."""
    assert plan.fitted is not None
    adapters = "adapters" if plan.fitted.step.method in ("lora", "dora") else "fp32 copies"
    return {adapters if n == "adapters" else n: b for n, b in describe_parts(prediction.memory).items()}


def _memory(plan: Plan) -> str:
    assert plan.estimated_bytes is not None
    have = f"{size(plan.usable_bytes)} to use (the device has {size(plan.backend.memory_total_bytes)})"
    learned = ""
    if plan.correction is not None:
        runs = plan.correction.num_runs
        learned = f", corrected by {runs} run{'s' * (runs != 1)} here (x {plan.correction.factor:.2f})"
    each = " on each device" if plan.world_size > 1 else ""
    return f"about {size(plan.estimated_bytes)} for a full step{each} (estimated{learned}), of {have}"


def _unknown(plan: Plan) -> str:
    return (
        f"not known: {plan.config.model_name} is not on this machine, and its sizes are not in the bundled table; "
        "train reads them once the model is here"
    )


def _time_rows(prediction: Prediction) -> list[tuple[str, str]]:
    time, steps = prediction.time, prediction.num_steps
    rows = []
    if steps is not None:
        rows.append(("steps", f"{steps:,}"))
    if time is None:
        rows.append(("time", "not known for this device; the first steps of a run show it"))
        return [*rows, *_unknown_cost(prediction)]
    error = (
        f"at most {100 * LARGEST_ERROR:.0f} % off on {NUM_CHECKED} measured runs of a 7B model on an H200; "
        "not checked elsewhere"
    )
    rows.append(
        (
            "speed",
            f"about {time.tokens_per_s:,.0f} tok/s, {_step(time.seconds)} a step, mostly {time.limit} "
            f"(predicted; {error})",
        )
    )
    cluster = prediction.cluster
    if cluster.size > 1:
        rows.append(
            (
                "processes",
                f"{cluster.num_nodes} x {cluster.num_local}, {cluster.sharding}: communication in "
                f"{100 * time.communication_share:.1f} % of the time, {100 * time.communication_s / time.seconds:.1f} % "
                "not overlapped with computation (predicted, not checked on several devices)",
            )
        )
    if prediction.hours is None:
        rows.append(("time", "not known: the number of steps is not known here; --max_steps sets it"))
        return [*rows, *_unknown_cost(prediction)]
    rows.append(("time", f"about {duration(3600 * prediction.hours)} for all steps"))
    if prediction.cost is not None:
        machines = f"{cluster.num_nodes:,} machines" if cluster.num_nodes > 1 else "the machine"
        each = " each" if cluster.num_nodes > 1 else ""
        price = f"{prediction.price_per_hour:g} an hour{each}"
        rows.append(("cost", f"about {prediction.cost:,.2f} for {machines} at {price}"))
    return rows


def _unknown_cost(prediction: Prediction) -> list[tuple[str, str]]:
    return [] if prediction.price_per_hour is None else [_COST_UNKNOWN]


def _step(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 10 else duration(seconds)
