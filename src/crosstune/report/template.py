"""Fill the templates of pages and charts, with all values escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from crosstune.core import __version__
from crosstune.core.safe_text import printable
from crosstune.files.outputs import write_output
from crosstune.report.charts import Chart
from crosstune.report.layout import layout

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


def write_page(target: Path, html: str) -> None:
    """Write a page atomically."""
    # A model may generate a lone surrogate, which UTF-8 cannot encode.
    write_output(target, html.encode("utf-8", errors="replace"))


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _asset(name: str) -> str:
    return resources.files("crosstune.report").joinpath(name).read_text(encoding="utf-8")
