"""Render the report of one run as a single self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from crosstune.core.atomic_files import write_bytes
from crosstune.core.control_characters import printable
from crosstune.core.errors import UserError
from crosstune.core.version import __version__
from crosstune.report.chart import draw, legend_key
from crosstune.report.event_log import MOST_EVENTS, event_rows
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
from crosstune.report.outcome import End, end_of, evaluations, totals, training_loss
from crosstune.report.quantity import show_time
from crosstune.report.run_charts import run_charts
from crosstune.report.samples import collect_samples

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
    html = render(load_run(run_dir))
    target = run_dir / REPORT_FILE
    try:
        write_bytes(target, html.encode("utf-8"))
    except OSError as error:
        raise UserError(f"Cannot write the report {target}.", why=str(error)) from error
    return target


def render(run: RunFiles) -> str:
    """Return the whole page as HTML, with the control characters of prompts, names and answers escaped."""
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(draw=draw, legend_key=legend_key)
    style, script = _asset("style.css"), _asset("script.js")
    page = environment.get_template("page.html.jinja").render(
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        version=__version__,
        **_contents(run),
    )
    return printable(page)


def _contents(run: RunFiles) -> dict[str, Any]:
    data_facts, data_grid, data_rest = data_tables(mapping(run.plan.get("data")))
    graphs = run_charts(run)
    events = event_rows(run)
    end = end_of(run)
    return {
        "run": run,
        "end": end,
        "missing": _missing(run, end),
        "facts": header_facts(run),
        "evaluations": evaluations(run),
        "training_loss": training_loss(run),
        "totals": totals(run),
        "charts": graphs.charts,
        "absent_charts": graphs.absent,
        "samples": collect_samples(run),
        "judge": collect_judge_test(run.folder),
        "asked": option_rows(run),
        "unasked": unasked_options(run),
        "adjustments": adjustment_rows(run),
        "data_facts": data_facts,
        "data_grid": data_grid,
        "data_rest": data_rest,
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


def _policy(style: str, script: str) -> str:
    """Return a Content-Security-Policy that allows only the page's own style and script, and no requests."""
    return "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_digest(style)}'",
            f"script-src '{_digest(script)}'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _asset(name: str) -> str:
    return resources.files("crosstune.report").joinpath(name).read_text(encoding="utf-8")
