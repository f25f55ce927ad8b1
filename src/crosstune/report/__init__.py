"""A page about one run, made from the files the run left behind."""

from crosstune.report.files import RunFiles, load_run
from crosstune.report.page import render, write_report

__all__ = ["RunFiles", "load_run", "render", "write_report"]
