"""Read run folders: list runs, compare them, and write pages about them."""

from crosstune.report.files import RunFiles, load_run
from crosstune.report.page import render, write_report

__all__ = ["RunFiles", "load_run", "render", "write_report"]
