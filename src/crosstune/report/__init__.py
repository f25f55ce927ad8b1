"""Write an HTML report of one run from the files in its folder."""

from crosstune.report.files import RunFiles, load_run
from crosstune.report.page import render, write_report

__all__ = ["RunFiles", "load_run", "render", "write_report"]
