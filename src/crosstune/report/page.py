"""Render the report of one run as a single self-contained HTML file, with its profile if there is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.events import Profiled
from crosstune.files.run_record import REPORT
from crosstune.report import outcome
from crosstune.report import tables as facts
from crosstune.report.charts import length_chart, memory_chart, run_charts
from crosstune.report.eval_section import collect_eval
from crosstune.report.files import RunFiles, listed, load_run, mapping, number
from crosstune.report.formatting import FormattedValue, show_number, show_seconds, show_share, show_time
from crosstune.report.judge_section import collect_judge_test
from crosstune.report.next_steps import next_steps
from crosstune.report.samples import collect_samples, lead_sample
from crosstune.report.template import fill, write_page

MAX_EVENTS = 400
MISSING_MEANS = {
    "config.yaml": "the requested options come from the plan.",
    "plan.json": "the resolved options, the data and the machine are unknown.",
    "metrics.jsonl": "no steps are recorded.",
    "events.jsonl": "no evaluations, samples, checkpoints or warnings are recorded.",
    "summary.json": "the run did not finish; totals are summed over its steps.",
}
DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, UserError)
"""Errors caused by values of a wrong type or range in the files of a run."""


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder, atomically."""
    target = run_dir / REPORT
    write_page(target, render(load_run(run_dir)), is_own=True)
    return target


def render(run: RunFiles, *, template: str = "page.html.jinja", draws: bool = True) -> str:
    """Return the page as HTML; `cell.html.jinja` has only the result and the curves. Without `draws`, the curves are left out.
    A section with damaged records is replaced by a warning."""
    problems = list(run.problems)

    def section(title: str, build: Callable[[], Any], default: Any = None) -> Any:
        try:
            return build()
        except DAMAGED as error:
            reason = error.why if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            problems.append(f"The section {title} is missing: its records are damaged ({reason}).")
            return default

    data = mapping(run.plan.get("data"))
    end = section("Status", lambda: outcome.end_of(run), outcome.RunEnd("unknown"))
    charts = section("Charts", lambda: run_charts(run) if draws else [], [])
    samples = section("Samples", lambda: collect_samples(run))
    events = section("Events", lambda: facts.event_rows(run), [])
    missing = [name for name in run.missing if name != "summary.json" or end.status != "running"]
    return fill(
        template,
        run=run,
        end=end,
        verdicts=section("Verdicts", lambda: outcome.verdicts(run), []),
        lead=section("Summary", lambda: outcome.lead_sentences(run, end), []),
        samples=samples,
        lead_sample=lead_sample(samples) if samples else None,
        missing=[(name, MISSING_MEANS[name]) for name in missing],
        facts=section("Run", lambda: facts.header_facts(run), []),
        evaluations=section("Evaluation", lambda: outcome.evaluations(run), []),
        training_loss=section("Training loss", lambda: outcome.training_loss(run)),
        totals=section("Totals", lambda: outcome.totals(run), []),
        next_steps=section("Next", lambda: next_steps(run, end), []),
        charts=[chart for chart in charts if chart.values],
        absent_charts=[chart.title for chart in charts if not chart.values],
        judge=section("Judge", lambda: collect_judge_test(run.folder)),
        benchmarks=section("Benchmarks", lambda: collect_eval(run.folder)),
        asked=section("Options", lambda: facts.option_rows(run), []),
        unasked=section("Options", lambda: facts.unasked_options(run), []),
        adjustments=section("Adjustments", lambda: facts.adjustment_rows(run), []),
        data=section("Data", lambda: facts.data_facts(data), ([], [])),
        lengths=section("Example lengths", lambda: length_chart(data)),
        example=section("Example", lambda: facts.masked_example(data)),
        expected=section("Plan", lambda: facts.plan_against_measured(run), []),
        profile=section("Profile", lambda: collect_profile(run)),
        machine=section("Machine", lambda: facts.machine_facts(run), []),
        versions=section("Versions", lambda: facts.version_facts(run), []),
        identity=section("Weights", lambda: facts.identity_facts(run), []),
        command=section("Command", lambda: facts.reproduce_command(run), ""),
        notable_events=[event for event in events if event["notable"]],
        events=events[-MAX_EVENTS:],
        num_events=len(events),
        written=show_time(datetime.fromtimestamp(run.read_time).astimezone()),
        problems=problems,
    )


MAX_OPERATORS = 15
MAX_PATHS = 20


def collect_profile(run: RunFiles) -> dict[str, Any] | None:
    """Return the last recorded profile; None if there is none."""
    events = run.events_of(Profiled)
    result = mapping(events[-1].get("result")) if events else {}
    step_s, phases = number(result.get("step_s")), mapping(result.get("phases"))
    if step_s is None or not phases:
        return None
    steps = len(listed(result.get("steps")))
    return {
        "title": f"{show_seconds(step_s).text} per step, the mean of {steps} recorded steps",
        "phases": _phases(phases),
        "figures": _figures(result, step_s),
        "operators": [_operator(mapping(each)) for each in listed(result.get("operators"))[:MAX_OPERATORS]],
        "memory": memory_chart(result.get("memory_timeline")),
        "files": [str(events[-1].get("path", "")), *map(str, listed(result.get("files")))][:MAX_PATHS],
    }


def _phases(phases: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each phase, with its position in the bar in percent."""
    rows, start = list[dict[str, Any]](), 0.0
    for place, (name, phase) in enumerate(phases.items()):
        share = number(mapping(phase).get("share")) or 0.0
        width = 100 * min(1.0, max(0.0, share))
        row = {"name": name, "share": show_share(share), "start": start, "width": width}
        row["color"] = 7 if name == "other" else 1 + place % 6
        rows.append(row | {"time": show_seconds(number(mapping(phase).get("seconds")) or 0.0)})
        start += width
    return rows


def _figures(result: Mapping[str, Any], step_s: float) -> list[tuple[str, FormattedValue]]:
    """Return the utilization of the device and its measured limits."""
    limits, found = mapping(result.get("limits")), list[tuple[str, FormattedValue]]()
    busy, cores = number(result.get("device_busy_share")), number(result.get("cores_busy"))
    flops, share = number(result.get("flops")), number(result.get("limit_share"))
    if busy is not None:
        found.append(("Device busy", show_share(busy)))
    if cores is not None:
        found.append(
            ("CPU", FormattedValue(f"{cores:.1f} of {result.get('num_cores')} cores busy", repr(cores)))
        )
    if flops and step_s > 0:
        found.append(("Matmul speed", _rate(flops / step_s, "FLOP/s")))
    if share is not None:
        found.append(("Fraction of the limit", show_share(share)))
    if (matrix := number(limits.get("flops_per_s"))) is not None:
        found.append(("Measured matmul limit", _rate(matrix, f"FLOP/s in {limits.get('dtype')}")))
    if (memory := number(limits.get("bytes_per_s"))) is not None:
        found.append(("Measured memory limit", _rate(memory, "B/s")))
    return found


def _rate(value: float, unit: str) -> FormattedValue:
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    factor, prefix = next((pair for pair in prefixes if value >= pair[0]), (1.0, ""))
    return FormattedValue(f"{show_number(value / factor).text} {prefix}{unit}", repr(value))


def _operator(each: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": f"{each.get('name', '')} {each.get('shapes') or ''}".strip(),
        "time": show_seconds(number(each.get("seconds")) or 0.0),
        "share": show_share(number(each.get("share")) or 0.0),
        "calls": show_number(number(each.get("calls")) or 0.0),
    }
