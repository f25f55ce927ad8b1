"""Print an error for people on standard error."""

from __future__ import annotations

from collections.abc import Sequence


def print_error(lines: Sequence[str]) -> None:
    """Print the lines of an error: the first of each problem in red, its reasons and remedies below it."""
    from crosstune.cli.output import ERROR, Output

    output = Output()
    for line in lines:
        indented = line.startswith("  ")
        output.line(line if indented else f"crosstune: {line}", style=None if indented else ERROR)
