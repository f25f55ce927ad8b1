"""Fill the templates of pages and charts, with all values escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from crosstune.core import __version__
from crosstune.core.safe_text import printable
from crosstune.files.atomic_files import write_bytes
from crosstune.files.outputs import write_output
from crosstune.report.charts import Chart
from crosstune.report.layout import layout

_CHART_STYLE = (
    "text{font:12px sans-serif;fill:#667}.grid line{stroke:#dde}.down{text-anchor:end}.across{text-anchor:middle}"
    ".marks line{stroke:#99a;stroke-dasharray:4 4}.marks .overfit{fill:#c60;opacity:.07}"
    ".curve path{fill:none;stroke-width:2;vector-effect:non-scaling-stroke}.faint path{opacity:.4}"
    ".c1 path{stroke:#26c}.c1 circle{fill:#26c}.c2 path{stroke:#c60}.c2 circle{fill:#c60}tspan.c1{fill:#26c}tspan.c2{fill:#c60}"
)
"""The style of a chart in a file of its own."""
MARK = b'<meta name="generator" content="crosstune">'
"""Marks every page in its head; a file with this mark may be overwritten."""


def fill(template: str, **contents: Any) -> str:
    """Return a page as HTML. Its policy allows only its own style and script, and no requests."""
    style, script = _asset("style.css"), _asset("script.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _environment().get_template(template)
    html = page.render(
        style=Markup(style), script=Markup(script), policy=policy, version=__version__, **contents
    )
    return printable(html.replace("\r\n", "\n"))


def draw(chart: Chart) -> Markup:
    """Return the chart as an SVG element; empty when no value is finite."""
    if not chart.values:
        return Markup()
    return Markup(_environment().get_template("chart.svg.jinja").render(chart=chart, **layout(chart)))


def draw_file(chart: Chart) -> str:
    """Return the chart as a self-contained SVG file with its legend."""
    plot = str(draw(chart)).replace(
        "<svg ", '<svg x="60" y="20" width="680" height="240" overflow="visible" ', 1
    )
    plot = re.sub(r' data-readout="[^"]*"', "", plot)  # for the script of the report
    legend = "".join(f'<tspan class="c{each.color}" dx="12">{each.label}</tspan>' for each in chart.series)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="310" viewBox="0 0 760 310"><style>{_CHART_STYLE}</style>'
        f'<rect width="760" height="310" fill="#fff"/>{plot}<text x="60" y="302">{chart.title.lower()}:{legend}</text></svg>\n'
    )


@cache
def _environment() -> Environment:
    """Return the template environment, cached, since compiling templates takes most of the time of a page."""
    environment = Environment(
        loader=FunctionLoader(_asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(draw=draw)
    return environment


def write_page(target: Path, html: str, *, is_own: bool = False) -> None:
    """Write a page atomically; one that `is_own` to a folder of ours replaces even a pipe, on which a writer would wait."""
    # A model may generate a lone surrogate, which UTF-8 cannot encode.
    (write_bytes if is_own else write_output)(target, html.encode("utf-8", errors="replace"))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _asset(name: str) -> str:
    return resources.files("crosstune.report").joinpath(name).read_text(encoding="utf-8")
