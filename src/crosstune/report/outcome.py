"""Determine a run's status, its metrics before and after training, its totals, and a summary in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from crosstune.core.events import Evaluated, Event, Failed, Loaded, Started, Stopped
from crosstune.report.files import RunFiles, is_running, listed, mapping, number
from crosstune.report.formatting import (
    NOT_FINITE,
    Change,
    FormattedValue,
    change_between,
    display_of,
    ordered,
    page_metrics,
    ranked,
    show_bytes,
    show_count,
    show_examples,
    show_rate,
    show_seconds,
    show_share,
)
from crosstune.report.series import (
    best_evaluation,
    evaluation_step,
    finite_values,
    overfitting,
    running_total,
    step_points,
)

METHODS = {
    "full": "all of its weights",
    "lora": "LoRA adapters",
    "dora": "DoRA adapters",
    "llama_pro": "new blocks (Llama-Pro)",
}
_SIGNALS = {
    "SIGINT": "By Ctrl-C.",
    "SIGTERM": "By SIGTERM, as the Stop button of the page, `kill` and schedulers send it.",
}
MAX_METRICS = 2
"""Metrics in the summary; the cards of the page show all."""


class RunEnd(NamedTuple):
    """The status of a run, and its reason."""

    status: str
    """See `status_of`."""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class MetricChange:
    """A metric at the start and at the end of a run; None where it was not measured."""

    label: str
    before: FormattedValue | None
    after: FormattedValue | None
    before_label: str
    after_label: str
    change: Change | None
    interval: str = ""
    """The 95 % interval of `after`."""


class Total(NamedTuple):
    """A total of the run, with a detail."""

    label: str
    value: FormattedValue
    detail: str = ""


def status_of(run: RunFiles, *, running: bool | None) -> str:
    """Return the status of a run: running, finished, stopped, failed, killed, damaged or unknown."""
    if running:
        return "running"
    recorded = run.summary.get("status")
    if recorded is not None:
        return str(recorded) if recorded in ("finished", "stopped", "failed") else "damaged"
    for event in reversed(run.events):
        if event.get("kind") in (Failed.kind, Stopped.kind):
            return str(event["kind"])
        if event.get("kind") == Started.kind:
            break  # what is before ended an earlier part of the run
    if run.problems:
        return "damaged"
    return "killed" if running is False else "unknown"


def end_of(run: RunFiles) -> RunEnd:
    """Return the status of a run and its reason, for the page."""
    status = status_of(run, running=is_running(run.folder))
    if status == "running":
        return RunEnd(status, "This page shows the steps so far.")
    if status == "killed":
        return RunEnd(status, "No end is recorded, and no process holds the run lock.")
    if status == "unknown":
        return RunEnd(status, "No end is recorded: it was killed, or its folder was copied while it ran.")
    event = next((_last(run, kind) for kind in (Failed, Stopped) if kind.kind == status), {})
    detail = str(run.summary.get("error") or event.get("error") or event.get("reason") or "")
    return RunEnd(status, _SIGNALS.get(detail, detail))


def _last(run: RunFiles, event: type[Event]) -> Mapping[str, Any]:
    return next(reversed(run.events_of(event)), {})


def evaluations(run: RunFiles) -> list[MetricChange]:
    """Return the evaluated metrics before training and at the result's step, or else at the last evaluation."""
    before = ranked(mapping(run.summary.get("eval_before")) or _metrics_when(run, "before"))
    after, after_label = _result_evaluation(run) or _last_evaluation(run)
    both = {name: (before.get(name), after.get(name)) for name in [*before, *after]}
    names = ordered(page_metrics(both))
    found = {name: _metric_change(name, before, after, labels=("before", after_label)) for name in names}
    for name, ends in mapping(run.summary.get("eval_intervals")).items():
        values = [value for end in listed(ends) if (value := number(end)) is not None]
        if name in found and after_label == "after" and len(values) == 2:
            low, high = map(display_of(name, values).show, values)
            found[name] = replace(found[name], interval=f"{low.text} to {high.text}")
    return list(found.values())


def verdicts(run: RunFiles) -> list[str]:
    """Return the recipe's verdicts on the run."""
    return [str(sentence) for sentence in mapping(run.summary.get("verdicts")).values()]


def training_loss(run: RunFiles) -> MetricChange | None:
    """Return the loss of the first and the last step; no verdict on it if the run overfits."""
    points = step_points(run.metrics, "loss")
    if points:
        first, last = {"loss": points[0][1]} if len(points) > 1 else {}, points[-1][1]
    elif "final_loss" in run.summary:
        first = {"loss": run.summary["first_loss"]} if "first_loss" in run.summary else {}
        last = run.summary["final_loss"]
    else:
        return None
    found = _metric_change("loss", first, {"loss": last}, labels=("first step", "last step"))
    if found.change is not None and overfitting(run) is not None:
        return replace(found, change=replace(found.change, verdict=""))
    return found


def _metrics_when(run: RunFiles, when: str) -> Mapping[str, Any]:
    found = [event for event in run.events_of(Evaluated) if event.get("when") == when]
    return mapping(found[-1].get("metrics")) if found else {}


def result_metrics(run: RunFiles) -> Mapping[str, Any]:
    """Return the evaluated metrics of the result."""
    return (_result_evaluation(run) or _last_evaluation(run))[0]


def _result_evaluation(run: RunFiles) -> tuple[Mapping[str, Any], str] | None:
    """Return the metrics of the best step if the result has the weights of that step and not the last weights."""
    best, last = mapping(run.summary.get("best")), mapping(run.summary.get("last"))
    step = number(best.get("step"))
    if step is None or step != run.summary.get("result_step") or step == last.get("step"):
        return None
    return mapping(best.get("metrics")), f"at step {step:,.0f}, the result"


def _last_evaluation(run: RunFiles) -> tuple[Mapping[str, Any], str]:
    after = mapping(run.summary.get("eval_after")) or _metrics_when(run, "after")
    later = [event for event in run.events_of(Evaluated) if event.get("when") != "before"]
    if not after and later:
        return mapping(later[-1].get("metrics")), f"at step {evaluation_step(later[-1], run):,.0f}"
    if not after and number(run.summary.get("eval_loss")) is not None:
        after = {"loss": run.summary["eval_loss"]}
    return after, "after"


def _metric_change(
    name: str, before: Mapping[str, Any], after: Mapping[str, Any], *, labels: tuple[str, str]
) -> MetricChange:
    first, last = number(before.get(name)), number(after.get(name))
    display = display_of(name, [value for value in (first, last) if value is not None])

    def show(values: Mapping[str, Any], value: float | None) -> FormattedValue | None:
        if value is not None:
            return display.show(value)
        return FormattedValue(NOT_FINITE) if name in values else None

    return MetricChange(
        label=display.label,
        before=show(before, first),
        after=show(after, last),
        before_label=labels[0],
        after_label=labels[1],
        change=None if first is None or last is None else change_between(first, last, display),
    )


def totals(run: RunFiles) -> list[Total]:
    """Return steps, tokens, speed, memory and parameters, from the summary or else summed over the steps."""
    steps, planned = number(run.summary.get("steps")), number(run.plan.get("num_steps"))
    done = run.last_step if steps is None else int(steps)
    found = [Total("Steps", show_count(done), f"of {planned:,.0f} planned" if planned else "")]
    tokens, supervised = summed(run, "tokens"), summed(run, "supervised_tokens")
    if tokens is not None:
        detail = "" if supervised is None else f"{show_count(supervised).text} supervised"
        found.append(Total("Tokens", show_count(tokens), detail))
    if (rate := speed(run)) is not None:
        found.append(Total("Speed", show_rate(rate)))
    if (peak := peak_memory(run)) is not None:
        sizes = (number(device.get("memory_total_bytes")) for device in devices(run))
        whole = min((size for size in sizes if size), default=None)
        detail = f"{show_share(peak / whole).text} of {show_bytes(whole).text}" if whole else ""
        found.append(Total("Peak memory", show_bytes(peak), detail))
    counted = run.summary if "trained_parameters" in run.summary else _last(run, Loaded)
    trained, whole = number(counted.get("trained_parameters")), number(counted.get("parameters"))
    if trained is not None:
        detail = f"{show_share(trained / whole).text} of {show_count(whole).text}" if whole else ""
        found.append(Total("Trained parameters", show_count(trained), detail))
    return found


def speed(run: RunFiles) -> float | None:
    """Return the tokens per second from the summary, or else over the steps."""
    tokens, seconds = summed(run, "tokens"), summed(run, "step_s")
    measured = tokens / seconds if tokens is not None and seconds else None
    recorded = number(run.summary.get("tokens_per_s"))
    return measured if recorded is None else recorded


def peak_memory(run: RunFiles) -> float | None:
    """Return the peak memory in bytes from the summary, or else the largest of the steps."""
    recorded = number(run.summary.get("peak_memory_bytes"))
    steps = finite_values(step_points(run.metrics, "memory_bytes"))
    return max(steps, default=None) if recorded is None else recorded


def summed(run: RunFiles, key: str) -> float | None:
    """Return a total from the summary, or else summed over the steps."""
    recorded = number(run.summary.get(key))
    has_steps = recorded is None and finite_values(step_points(run.metrics, key))
    return running_total(run, key)[-1][1] if has_steps else recorded


def duration(run: RunFiles) -> FormattedValue | None:
    """Return the run's duration, or else the time spent in steps."""
    seconds, spent = number(run.summary.get("seconds")), summed(run, "step_s")
    if seconds is None and spent is not None:
        return FormattedValue(f"{show_seconds(spent).text} in steps")
    return None if seconds is None else show_seconds(seconds)


def devices(run: RunFiles) -> list[Mapping[str, Any]]:
    """Return the devices of the backend that ran."""
    backends = mapping(mapping(run.plan.get("machine")).get("backends"))
    return [
        mapping(each) for each in listed(mapping(backends.get(str(run.plan.get("backend")))).get("devices"))
    ]


def lead_sentences(run: RunFiles, end: RunEnd) -> list[str]:
    """Describe the training, the change of the metrics, and the weights in the result; of a running run, without figures
    that change at each step."""
    sentences = (_trained(run, end), _changed(run, end), _result(run))
    return [sentence for sentence in sentences if sentence]


def _trained(run: RunFiles, end: RunEnd) -> str:
    verb = {"finished": "Trained", "running": "Training"}.get(end.status, "Started training")
    parts = [f"{verb} {_model(run)}"]
    data = mapping(run.plan.get("data"))
    if name := data.get("dataset") or run.asked.get("dataset"):
        counted = show_examples(data)
        parts.append(f"on {counted}{' of ' * bool(counted)}{Path(str(name)).name or name}")
    steps, planned = show_count(run.last_step).text, number(run.plan.get("num_steps"))
    if end.status == "running":
        parts.append(f"for {planned:,.0f} steps" if planned else "")
    elif end.status == "finished" or not planned:
        parts.append(f"for {steps} step{'s' * (run.last_step != 1)}")
    else:
        parts.append(f"for {steps} of {planned:,.0f} steps")
    if (spent := duration(run)) is not None and run.summary.get("seconds"):
        parts.append(f"in {spent.text}")
    if backend := run.plan.get("backend") or run.summary.get("backend"):
        parts.append(f"on {backend}")
    return " ".join(filter(None, parts)) + "."


def _model(run: RunFiles) -> str:
    model = mapping(run.plan.get("model"))
    name = str(model.get("name") or run.asked.get("model_name") or "a model")
    recipe, method = str(run.asked.get("recipe") or "sft"), str(run.plan.get("method") or "")
    if model.get("source") == "recipe":
        return f"the model of the {recipe} recipe"
    name = Path(name).name if name.startswith(("/", ".", "~")) else name
    whole = f"{name} as a judge" if recipe == "judge" else name
    base, quantizer = "", run.plan.get("quantizer")
    if quantizer and quantizer != "none":
        bits = f"{run.plan['n_bits']}-bit " if run.plan.get("n_bits") else ""
        base = f" on a {bits}{quantizer} base"
    return f"{whole} with {METHODS.get(method, method)}{base}" if method else whole


def _changed(run: RunFiles, end: RunEnd) -> str:
    """Describe how the evaluated metrics changed, or the training loss if nothing was evaluated since the start."""
    rows = evaluations(run)
    found = [text for row in rows if (text := _change_text(row))]
    if found:
        return f"On held-out data {' and '.join(found[:MAX_METRICS])}."
    running = end.status == "running"
    loss = None if running else training_loss(run)
    said = _change_text(loss, label="the training loss") if loss is not None else ""
    if rows or running:
        return f"T{said[1:]}." if said else ""
    return f"No held-out data was evaluated{'; ' * bool(said)}{said}."


def _change_text(row: MetricChange, *, label: str = "") -> str:
    if row.change is None or row.before is None or row.after is None:
        return ""
    label = label or ("the loss" if row.label == "loss" else row.label)
    if row.change.verdict == "unchanged":
        return f"{label} stayed at {row.after.text}"
    if row.before.text == row.after.text:
        return f"{label} hardly changed from {row.after.text}"
    verb = "rose" if row.change.rising else "fell"
    worse = " (worse)" if row.change.verdict == "worse" else ""
    return f"{label} {verb} from {row.before.text} to {row.after.text}{worse}"


def _result(run: RunFiles) -> str:
    best = best_evaluation(run)
    if best is None or best.is_last:
        return ""
    if run.summary.get("result_step") == best.step:
        return f"The result has the weights of step {best.step:,.0f}, the step with the best evaluation."
    lowest = f"The evaluation loss was lowest at step {best.step:,.0f}; the model overfits after it."
    return lowest if best.overfits else ""
