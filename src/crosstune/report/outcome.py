"""Determine the outcome of a run: status, evaluation before and after training, totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.core.events import Evaluated, Event, Failed, Loaded, Stopped
from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.live import is_running
from crosstune.report.metric import Change, change_between, display_of, ordered
from crosstune.report.quantity import (
    NOT_FINITE,
    Shown,
    show_bytes,
    show_count,
    show_rate,
    show_seconds,
    show_share,
)
from crosstune.report.series import evaluation_step, finite_values, step_points

QUIET_S = 600.0
"""A run counts as killed when it wrote nothing for this long and for ten times its slowest step."""


@dataclass(frozen=True, kw_only=True)
class End:
    status: str
    """finished, stopped, failed or running."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A metric at the start and at the end of a run."""

    label: str
    before: Shown | None
    """None when it was not measured."""
    after: Shown | None
    before_label: str
    after_label: str
    change: Change | None


@dataclass(frozen=True, kw_only=True)
class Total:
    label: str
    value: Shown
    detail: str = ""


def end_of(run: RunFiles) -> End:
    """Return the recorded status; without one, infer it from the last events and the time of the last write."""
    endings = {event.kind: _last(run, event) for event in (Failed, Stopped)}
    running = is_running(run.folder)
    if running:
        return End(status="running", detail="This page shows the steps so far.")
    recorded = run.summary.get("status")
    status = str(recorded) if recorded is not None else None
    if status is None:
        status = next((kind for kind, event in endings.items() if event), None)
    if status is None and running is False:
        return End(status="stopped", detail="No end is recorded, and no process runs it: it was killed.")
    if status is None:
        return _unrecorded_end(run)
    if status not in endings:
        return End(status=status)
    detail = run.summary.get("error") or endings[status].get("error") or endings[status].get("reason")
    return End(status=status, detail=str(detail or ""))


def _unrecorded_end(run: RunFiles) -> End:
    idle_s = max(0.0, run.read_time - run.last_write_time)
    slowest_s = max(finite_values(step_points(run.metrics, "step_s")), default=0.0)
    ago = show_seconds(idle_s).text if idle_s >= 60 else "less than a minute"
    if idle_s <= max(QUIET_S, 10 * slowest_s):
        return End(
            status="running", detail=f"No end is recorded; the last line was written {ago} before this page."
        )
    return End(
        status="stopped",
        detail=f"No end is recorded and nothing was written for {ago}: the run was probably killed.",
    )


def _last(run: RunFiles, event: type[Event]) -> Mapping[str, Any]:
    return next(reversed(run.events_of(event)), {})


def evaluations(run: RunFiles) -> list[Measured]:
    """Return every evaluated metric before training and of the result: of its step, or at the last evaluation."""
    before = mapping(run.summary.get("eval_before")) or _metrics_when(run, "before")
    after, after_label = _result_evaluation(run) or _last_evaluation(run)
    rows = []
    for name in ordered(dict.fromkeys([*before, *after])):
        rows.append(_measured(name, before, after, labels=("before", after_label)))
    return rows


def training_loss(run: RunFiles) -> Measured | None:
    """Return the loss of the first and the last step."""
    points = step_points(run.metrics, "loss")
    if points:
        first = {"loss": points[0][1]} if len(points) > 1 else {}
        return _measured("loss", first, {"loss": points[-1][1]}, labels=("first step", "last step"))
    if "final_loss" not in run.summary:
        return None
    first = {"loss": run.summary["first_loss"]} if "first_loss" in run.summary else {}
    return _measured("loss", first, {"loss": run.summary["final_loss"]}, labels=("first step", "last step"))


def _metrics_when(run: RunFiles, when: str) -> Mapping[str, Any]:
    found = [event for event in run.events_of(Evaluated) if event.get("when") == when]
    return mapping(found[-1].get("metrics")) if found else {}


def _result_evaluation(run: RunFiles) -> tuple[Mapping[str, Any], str] | None:
    """Return the metrics of the best step, if its weights are the result and not those of the last step."""
    best, last = mapping(run.summary.get("best")), mapping(run.summary.get("last"))
    step = number(best.get("step"))
    if step is None or step != run.summary.get("result_step") or step == last.get("step"):
        return None
    return mapping(best.get("metrics")), f"at step {step:,.0f}, the result"


def _last_evaluation(run: RunFiles) -> tuple[Mapping[str, Any], str]:
    after = mapping(run.summary.get("eval_after")) or _metrics_when(run, "after")
    if after:
        return after, "after"
    later = [event for event in run.events_of(Evaluated) if event.get("when") != "before"]
    if later:
        return mapping(later[-1].get("metrics")), f"at step {evaluation_step(later[-1], run):,.0f}"
    if number(run.summary.get("eval_loss")) is not None:
        return {"loss": run.summary["eval_loss"]}, "after"
    return {}, "after"


def _measured(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], *, labels: tuple[str, str]
) -> Measured:
    first, last = number(before.get(name)), number(after.get(name))
    display = display_of(name, [value for value in (first, last) if value is not None])

    def show(values: Mapping[str, Any], value: float | None) -> Shown | None:
        if value is not None:
            return display.show(value)
        return Shown(NOT_FINITE) if name in values else None

    return Measured(
        label=display.label,
        before=show(before, first),
        after=show(after, last),
        before_label=labels[0],
        after_label=labels[1],
        change=None if first is None or last is None else change_between(first, last, display),
    )


def totals(run: RunFiles) -> list[Total]:
    """Return steps, tokens, speed, memory and parameters, from the summary or else summed over the steps."""
    found = [_steps(run), _tokens(run), _speed(run), _memory(run), _parameters(run)]
    return [total for total in found if total is not None]


def duration(run: RunFiles) -> Shown | None:
    seconds = number(run.summary.get("seconds"))
    if seconds is not None:
        return show_seconds(seconds)
    spent = finite_values(step_points(run.metrics, "step_s"))
    return (
        Shown(f"{show_seconds(sum(spent)).text} in steps", show_seconds(sum(spent)).full) if spent else None
    )


def _steps(run: RunFiles) -> Total:
    done, planned = run.last_step, number(run.plan.get("num_steps"))
    summary_steps = number(run.summary.get("steps"))
    if summary_steps is not None:
        done = int(summary_steps)
    detail = f"of {planned:,.0f} planned" if planned else ""
    return Total(label="Steps", value=show_count(done), detail=detail)


def _summed(run: RunFiles, key: str) -> float | None:
    value = number(run.summary.get(key))
    if value is not None:
        return value
    values = finite_values(step_points(run.metrics, key))
    return sum(values) if values else None


def _tokens(run: RunFiles) -> Total | None:
    tokens, supervised = _summed(run, "tokens"), _summed(run, "supervised_tokens")
    if tokens is None:
        return None
    detail = "" if supervised is None else f"{show_count(supervised).text} carry loss"
    return Total(label="Tokens", value=show_count(tokens), detail=detail)


def _speed(run: RunFiles) -> Total | None:
    rate = number(run.summary.get("tokens_per_s"))
    detail = ""
    if rate is None:
        tokens = finite_values(step_points(run.metrics, "tokens"))
        seconds = sum(finite_values(step_points(run.metrics, "step_s")))
        rate, detail = (sum(tokens) / seconds, "over all steps") if tokens and seconds > 0 else (None, "")
    return None if rate is None else Total(label="Speed", value=show_rate(rate), detail=detail)


def _memory(run: RunFiles) -> Total | None:
    peak = number(run.summary.get("peak_memory_bytes"))
    if peak is None:
        peak = max(finite_values(step_points(run.metrics, "memory_bytes")), default=None)
    if peak is None:
        return None
    sizes = [number(device.get("memory_total_bytes")) for device in devices(run)]
    whole = min((size for size in sizes if size), default=None)
    detail = f"{show_share(peak / whole).text} of {show_bytes(whole).text}" if whole else ""
    return Total(label="Peak memory", value=show_bytes(peak), detail=detail)


def devices(run: RunFiles) -> list[Mapping[str, Any]]:
    """Return the devices of the backend that ran."""
    backends = mapping(mapping(run.plan.get("machine")).get("backends"))
    found = mapping(backends.get(str(run.plan.get("backend")))).get("devices")
    return [mapping(device) for device in found] if isinstance(found, list) else []


def _parameters(run: RunFiles) -> Total | None:
    counted = run.summary if "trained_parameters" in run.summary else _last(run, Loaded)
    trained, whole = number(counted.get("trained_parameters")), number(counted.get("parameters"))
    if trained is None:
        return None
    detail = f"{show_share(trained / whole).text} of {show_count(whole).text}" if whole else ""
    return Total(label="Trained parameters", value=show_count(trained), detail=detail)
