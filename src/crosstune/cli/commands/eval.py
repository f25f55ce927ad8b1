"""`crosstune eval`: run benchmarks on a run and its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from crosstune.cli.arguments import Parser, announce_command, at_least, print_result, read_run
from crosstune.cli.terminal.output import Column, table_lines, terminal_width

EXAMPLES = """examples:
  crosstune eval runs/demo --tasks arc_easy,hellaswag --limit 200
  crosstune eval runs/demo --tasks my_task.yaml --chat
  crosstune eval smollm2-135m --tasks arc_easy --num_fewshot 5

A run is evaluated before training (its base model) and after training. Each finished task is kept in the run folder
(benchmarks.json), shown on the page of the run, and not computed again. Without --chat, prompts are plain text, as on
most leaderboards; scores of the two formats cannot be compared, and every score is labeled with its format.
Tasks come from lm-evaluation-harness; a YAML file in its format defines your own task on local files."""


def make_parser() -> Parser:
    about = "Run benchmarks of lm-evaluation-harness on a run or a model, before and after training."
    parser = Parser("eval", description=about, epilog=EXAMPLES)
    add = parser.add_argument
    add("target", type=read_run, metavar="RUN|MODEL", help="a run, an adapter or a model")
    add("--tasks", required=True, metavar="A,B", help="task names or YAML files, separated by commas")
    add("--chat", action="store_true", help="format each prompt with the model's chat template")
    shots = "examples in each prompt (default: the task's own number)"
    add("--num_fewshot", type=at_least(0), metavar="N", help=shots)
    add("--limit", type=at_least(1), metavar="N", help="only the first N rows of each task")
    add(
        "--batch_size",
        type=at_least(1),
        default=64,
        help="prompts generated together (default 64)",
    )
    add("--backend", default="auto", help="backend to run on (default auto)")
    add("--precision", default="auto", help="dtype to compute in (default auto)")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    tasks = [task.strip() for task in own.tasks.split(",") if task.strip()]
    announce_command("eval", own.target, "importing the harness and the engine")

    from pathlib import Path

    from crosstune.cli.commands.train import try_report
    from crosstune.cli.terminal.screen import Screen
    from crosstune.files.run_record import BENCHMARKS
    from crosstune.report.eval_section import eval_rows
    from crosstune.results.evaluate import EvalRequest, evaluate

    request = EvalRequest(
        target=own.target,
        tasks=tasks,
        chat_template=own.chat,
        num_fewshot=own.num_fewshot,
        limit=own.limit,
        batch_size=own.batch_size,
        backend=own.backend,
        precision=own.precision,
    )
    with Screen(live=not own.json, stream=sys.stderr) as screen:  # the harness's output is hidden
        results = evaluate(request, observer=screen)
    rows = (eval_rows(results) or {"rows": []})["rows"]
    sides = [side for side in ("before", "after") if any(row[side] != "–" for row in rows)]
    titles = {name: name for name in ("task", "metric", *sides)}
    if sides == ["after"]:
        titles["after"] = "result"
    columns = [Column(title=title, cells=[row[name] for row in rows]) for name, title in titles.items()]
    if len(sides) == 2:
        columns.append(Column(title="change", cells=[row["change"] for row in rows]))
    columns.append(Column(title="prompts", cells=[row["format"] for row in rows], rank=1))
    lines = [*table_lines(columns, width=terminal_width()), "  in brackets: 95 % confidence intervals"]
    kept = Path(own.target).expanduser() / BENCHMARKS
    if kept.is_file():
        report = try_report(kept.parent, screen)
        lines += [f"written  {kept}", *([f"report   {report}"] if report is not None else [])]
    return print_result({"results": results}, lines, as_json=own.json)
