"""`crosstune train`: fine-tune a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.cli.arguments import Parser, announce_command, parse_config, print_json, read_path_or_name
from crosstune.cli.terminal.streams import Stream
from crosstune.config.recipe_spec import trained_name
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, LIBRARY_FAULTS, PeerLost, UserError
from crosstune.core.events import Observer
from crosstune.distributed.environment import read_nodes, read_ranks
from crosstune.process.ranks import Group, Ranks

if TYPE_CHECKING:
    from crosstune.cli.terminal.screen import ProgressLine, Screen
    from crosstune.loop.stop import StopSignal
    from crosstune.runs.pipeline import RunResult
    from crosstune.tracking.observe import Tracking

EXAMPLES = """examples:
  crosstune train
  crosstune train --model_name ./my-model --dataset chats.jsonl --num_epochs 3 --name first-try
  crosstune train --train_type full --lr 2e-5 --precision bf16 --use_gradient_checkpointing
  crosstune train --recipe preference --dataset pairs.jsonl --beta 0.1 --name dpo     (rows with prompt, chosen and rejected)
  crosstune train --base_precision fp8                    (LoRA on a frozen base in fp8, on GPUs with fp8)
  crosstune train --config run.yaml --max_steps 20        (flags override the file)
  crosstune train --name long --num_epochs 3 --save_steps 100 --resume auto     (run it again to continue after a crash)
  crosstune train --name tracked --log_to tensorboard,wandb --project_name my-runs   (WANDB_MODE=offline keeps wandb local)
  crosstune train --resume runs/long                      (continue a run with its options)
  crosstune train --emulate mps --machine apple-m1-16gb   (check whether this run would work on that Mac)"""


def make_parser() -> Parser:
    parser = Parser("train", description="Fine-tune a model on this machine.", epilog=EXAMPLES)
    add_machine(parser)
    return parser


def add_machine(parser: Parser) -> None:
    parser.add_argument(
        "--machine",
        type=read_path_or_name,
        metavar="NAME|FILE",
        help="with --emulate: the machine to emulate",
    )


def run(words: Sequence[str]) -> int:
    own, config = parse_config(make_parser(), words)
    command = ["train", *words]

    def train(config: Config, group: Group) -> int:
        return _train(config, ["crosstune", *command], group, as_json=own.json)

    return run_in_processes(own, config, command, train)


def run_in_processes(
    own: argparse.Namespace,
    config: Config,
    command: Sequence[str],
    train: Callable[[Config, Group], int],
) -> int:
    """Emulate a run, start its processes with the same command, or train in this one; return the exit code."""
    if config.emulate is not None:
        from crosstune.cli.commands.plan import run_emulated

        return run_emulated(config, machine=own.machine, as_json=own.json, with_plan=False)
    if own.machine is not None:
        raise UserError(
            "--machine needs --emulate: train runs on this machine.",
            do="crosstune plan --machine shows what a different machine would do",
        )

    ranks, nodes = read_ranks(config), read_nodes(config)
    if ranks is None:
        announce_run("judge train" if command[0] == "judge" else "train", config)
        from crosstune.cli.commands.start_ranks import num_local_processes, start_ranks

        if (num_local := num_local_processes(config, nodes)) > 1 or (
            nodes is not None and nodes.num_nodes > 1
        ):
            return start_ranks(command, config, nodes=nodes, num_local=num_local)
    elif ranks.launcher is not None:
        from crosstune.distributed.launch import follow

        follow(ranks.launcher)
    from crosstune.distributed.group import connected, errors_with_rank

    with connected(config, ranks) as group, errors_with_rank(group):
        if ranks is not None and ranks.launcher is None:
            _announce_node(ranks)
        return train(after_restart(config, group), group)


def _announce_node(ranks: Ranks) -> None:
    """Announce a node without rank 0, whose processes torchrun or a scheduler started."""
    if not ranks.node_rank or ranks.local_rank or ranks.attempt:
        return
    from crosstune.distributed.launch import joined_line

    here, node = (
        range(ranks.rank, ranks.rank + ranks.local_size),
        f"node {ranks.node_rank} of {ranks.num_nodes}",
    )
    line = joined_line(node=node, ranks=here, size=ranks.size, master_addr=ranks.master_addr)
    print(line, file=sys.stderr, flush=True)


def announce_run(command: str, config: Config) -> None:
    """Announce the run on standard error. A stalled terminal delays the run by at most two seconds."""
    if isinstance(sys.stderr, Stream):
        sys.stderr.unblock()
    where = f" on {config.backend}" if config.backend != "auto" else ""
    resumed = config.resume if config.resume not in ("none", "auto") else None
    what = f"continuing {resumed}" if resumed else trained_name(config)
    announce_command(command, f"{what}{where}", "probing the machine")


def after_restart(config: Config, group: Group) -> Config:
    """Return the request of this attempt; after a restart, it resumes the run of the earlier attempt."""
    from crosstune.checkpoint.read import newest_valid
    from crosstune.distributed.group import recall_folder, restarted

    if (folder := recall_folder(group)) is None:
        return config
    found = (
        newest_valid(folder / CHECKPOINTS, on_damaged=lambda error: None, hashes=False)
        if group.ranks.first
        else None
    )
    return restarted(config, folder, has_checkpoint=group.any(found is not None))


def _train(config: Config, command: Sequence[str], group: Group, *, as_json: bool) -> int:
    result, report = show_training(config, group, command=command, as_json=as_json)
    summary = result.summary
    if as_json and group.ranks.first:
        print_json(summary | {"folder": str(result.folder), "report": str(report) if report else None})
    finish_together(result, group)
    return EXIT_DONE if summary["status"] == "finished" else EXIT_STOPPED


def show_training(
    config: Config,
    group: Group,
    *,
    command: Sequence[str] | None = None,
    observers: Sequence[Observer] = (),
    stop: StopSignal | None = None,
    tracking: Tracking | None = None,
    quiet: bool = False,
    as_json: bool = False,
    line: ProgressLine | None = None,
) -> tuple[RunResult, Path | None]:
    """Train, print progress and outcome unless `quiet`, and write the report; return the run and the report. A `line` shows
    the progress in place."""
    from crosstune.cli.terminal.event_lines import ending_lines
    from crosstune.cli.terminal.screen import open_screen
    from crosstune.loop.stop import StopSignal
    from crosstune.runs.pipeline import train

    with open_screen(config, as_json=as_json, quiet=quiet, line=line) as screen:
        result = train(
            config,
            observers=[screen, *observers],
            command=command,
            group=group,
            stop=stop,
            tracking=tracking,
        )
    report = None
    if group.ranks.first:
        with StopSignal().listening():  # the run is over: a signal must not interrupt its report
            report = try_report(result.folder, screen)
        for text, style in ending_lines(result.summary, result.folder, report):
            screen.output.line(text, style=style)
        screen.output.drain()
    return result, report


def finish_together(result: RunResult, group: Group) -> None:
    """Wait for the other processes of a run, and raise the error that stopped it, if any."""
    if not isinstance(result.failure, PeerLost):
        group.barrier()  # under mlx.launch, the first process to exit terminates the others
    if result.failure is not None:
        raise result.failure


def try_report(folder: Path, screen: Screen) -> Path | None:
    """Write the page of a run; print a warning if that fails, because the work itself is done."""
    from crosstune.cli.terminal.output import WARNING
    from crosstune.report import write_report

    try:
        return write_report(folder)
    except UserError as error:
        lines = error.lines()
    except LIBRARY_FAULTS as error:
        lines = [f"The page of {folder} could not be drawn.", f"  why: {type(error).__name__}: {error}."]
    screen.output.line("\n".join(lines), style=WARNING)
    return None
