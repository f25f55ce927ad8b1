"""Render the report of one run as a single self-contained HTML file."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from crosstune.report.data_section import SHOWN_APART, length_chart, masked_example
from crosstune.report.event_log import MOST_EVENTS, event_rows
from crosstune.report.expected import plan_against_measured
from crosstune.report.facts import (
    adjustment_rows,
    data_tables,
    header_facts,
    identity_facts,
    machine_facts,
    option_rows,
    reproduce_command,
    unasked_options,
    version_facts,
)
from crosstune.report.files import RunFiles, load_run, mapping
from crosstune.report.judge_section import collect_judge_test
from crosstune.report.lead import lead_sample, lead_sentences
from crosstune.report.next_steps import next_steps
from crosstune.report.outcome import End, end_of, evaluations, totals, training_loss
from crosstune.report.profile_section import collect_profile
from crosstune.report.quantity import show_time
from crosstune.report.run_charts import run_charts
from crosstune.report.samples import collect_samples
from crosstune.report.template import fill, write_page

REPORT_FILE = "report.html"
MISSING_MEANS = {
    "config.yaml": "the requested options are taken from the plan.",
    "plan.json": "the resolved options, the data and the machine are unknown.",
    "metrics.jsonl": "no steps are recorded.",
    "events.jsonl": "no evaluations, samples, checkpoints or warnings are recorded.",
    "summary.json": "the run did not finish; totals are summed over its steps.",
}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder, atomically."""
    target = run_dir / REPORT_FILE
    write_page(target, render(load_run(run_dir)))
    return target


def render(run: RunFiles) -> str:
    """Return the whole page as HTML."""
    return fill("page.html.jinja", **_contents(run))


def _contents(run: RunFiles) -> dict[str, Any]:
    data = mapping(run.plan.get("data"))
    plain = {name: value for name, value in data.items() if name not in SHOWN_APART}
    data_facts, data_grid, data_rest = data_tables(plain)
    graphs, samples = run_charts(run), collect_samples(run)
    events = event_rows(run)
    end = end_of(run)
    return {
        "run": run,
        "end": end,
        "lead": lead_sentences(run, end),
        "lead_sample": lead_sample(samples),
        "missing": _missing(run, end),
        "facts": header_facts(run),
        "evaluations": evaluations(run),
        "training_loss": training_loss(run),
        "totals": totals(run),
        "next_steps": next_steps(run, end),
        "charts": graphs.charts,
        "absent_charts": graphs.absent,
        "samples": samples,
        "judge": collect_judge_test(run.folder),
        "asked": option_rows(run),
        "unasked": unasked_options(run),
        "adjustments": adjustment_rows(run),
        "data_facts": data_facts,
        "data_grid": data_grid,
        "data_rest": data_rest,
        "lengths": length_chart(data),
        "example": masked_example(data),
        "expected": plan_against_measured(run),
        "profile": collect_profile(run),
        "machine": machine_facts(run),
        "versions": version_facts(run),
        "identity": identity_facts(run),
        "command": reproduce_command(run),
        "notable_events": [event for event in events if event.notable],
        "events": events[-MOST_EVENTS:],
        "num_events": len(events),
        "written": show_time(datetime.fromtimestamp(run.read_time).astimezone()),
    }


def _missing(run: RunFiles, end: End) -> list[tuple[str, str]]:
    """Return the files that should exist by now, and what the page lacks without each."""
    expected = [name for name in run.missing if not (name == "summary.json" and end.status == "running")]
    return [(name, MISSING_MEANS[name]) for name in expected]
