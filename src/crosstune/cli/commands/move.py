"""`crosstune move`: pack a run into an archive to continue it on a different machine or backend."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from crosstune.cli.arguments import Line, Parser, announce_command, print_result, read_path, read_run_path
from crosstune.cli.terminal.units import size
from crosstune.files.paths import shown_path

EXAMPLES = """examples:
  crosstune move runs/demo --to mlx
  crosstune move runs/demo/checkpoints/step-00000200 --to cuda --out demo.crosstune.tar
  crosstune train --resume demo.crosstune.tar --backend mlx          on the other machine

The archive contains the newest valid checkpoint (weights, optimizer, schedule, data position), the logs and local data
files, but not the base model: the other machine downloads it or finds it with --model_name. The loss on the next
batches is measured on this machine, and again on the other before training continues."""


def make_parser() -> Parser:
    parser = Parser(
        "move", description="Pack a run into one archive to continue it elsewhere.", epilog=EXAMPLES
    )
    add = parser.add_argument
    add("target", type=read_run_path, metavar="RUN|CHECKPOINT")
    add("--to", required=True, metavar="BACKEND", help="target backend: mlx, cuda, mps, cpu, ...")
    add("--out", type=read_path, help="path of the archive (default: next to the run)")
    add("--overwrite", action="store_true", help="replace an existing archive")
    add("--machine", help="target machine: a profile or a file written by `crosstune doctor --json`")
    add("--model_name", help="the base model on this machine, if not under its recorded name")
    add("--without_data", action="store_true", help="do not include local data files")
    add("--force", action="store_true", help="write the archive even if the losses differ too much")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    announce_command("move", str(own.target), "importing the engine")
    from crosstune.cli.terminal.screen import Screen
    from crosstune.runs.move import move

    with Screen(live=not own.json) as screen:
        report = move(
            own.target,
            to=own.to,
            observer=screen,
            out=own.out.absolute() if own.out else None,
            machine=own.machine,
            with_data=not own.without_data,
            force=own.force,
            overwrite=own.overwrite,
            model_name=own.model_name,
        )
    return print_result(report, _lines(report), as_json=own.json)


def _lines(report: Mapping[str, Any]) -> Iterator[Line]:
    assumed = ", typical for this backend; specify yours with --machine" if report["assumed_machine"] else ""
    yield f"machine  planned for {report['machine']}{assumed}"
    if report["compared"] is None:
        why = f"this machine has no {report['to']}"
        if report["to"] == report["from"]:
            why = "the backend is the same"
        elif report["to"] == report["measured"]["backend"]:
            why = f"this machine has no {report['from']}"
        yield f"note     {why}: the loss is compared on the other machine, before training continues"
    yield f"written  {report['path']} ({size(report['bytes'])}, step {report['step']})"
    if report["model"]:
        yield (
            f"base     {report['model']['name']} is not in the archive: provide it under this name on the other machine, or "
            "pass --model_name"
        )
    more = f" --model_name {report['model_name']}" if report["model_name"] else ""
    more += " --world_size 1" if report["processes"] > 1 else ""
    yield f"continue crosstune train --resume {shlex.quote(shown_path(report['path']))} --backend {report['to']}{more}"
