"""`--emulate` of train and plan: print whether a run would work on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from crosstune.cli.units import duration
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_USER_MUST_ACT

if TYPE_CHECKING:
    from crosstune.emulate.verdict import Row, Verdict

MOST_SHOWN = 12


def judge(config: Config, *, machine: str | None, as_json: bool) -> Verdict:
    """Emulate the run on this machine and show its progress."""
    from crosstune.cli.screen import open_screen
    from crosstune.emulate.verdict import emulate

    with open_screen(config, as_json=as_json) as screen:
        return emulate(config, machine=machine, observers=[screen])


def exit_code(verdict: Verdict) -> int:
    return EXIT_DONE if verdict.works else EXIT_USER_MUST_ACT


def print_verdict(verdict: Verdict) -> None:
    tried = verdict.tried
    answers = f", an evaluation with {tried.num_answers} answers" if tried.evaluated else ""
    _row("emulated", f"{verdict.title} on this CPU, as {verdict.plan.machine.name} would run it")
    _row(
        "checked",
        f"{len(tried.losses)} step{'s' * (len(tried.losses) != 1)}{answers} and a checkpoint in {duration(tried.seconds)}: {verdict.num_operators} operators, "
        f"{verdict.num_calls:,} calls, against the operator table of torch {verdict.torch_version}",
    )
    _row("verdict", verdict.sentence(), style="green" if verdict.works else "bold red")
    _rows("refused", verdict.refused, "returns {what}, which " + verdict.title + " does not have")
    _rows("fails", verdict.failing, f"has no {verdict.title} kernel, and {{what}}")
    _rows("slow", verdict.fallen_back, f"has no {verdict.title} kernel; {{what}}")
    _rows("custom", verdict.custom, "{what}")
    for sentence in verdict.conditions:
        _row("condition", sentence)
    for sentence in verdict.not_checked:
        _row("not checked", sentence)


def _rows(label: str, rows: Sequence[Row], template: str) -> None:
    for row in rows[:MOST_SHOWN]:
        calls = f"{row['calls']:,} call{'s' * (row['calls'] != 1)}"
        _row(
            label, f"{row['operator']} {template.format(what=row['what'])}; {calls}, first at {row['where']}"
        )
    if len(rows) > MOST_SHOWN:
        _row(label, f"and {len(rows) - MOST_SHOWN} more; --json lists them all")


def _row(label: str, text: str, *, style: str | None = None) -> None:
    from crosstune.cli.output import print_line

    print_line(f"{label:<12} {text}", style=style)
