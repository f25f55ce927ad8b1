"""`crosstune train`: fine-tune a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, parse_config, print_json
from crosstune.cli.units import duration, size
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, PeerLost, UserError
from crosstune.core.events import Observer
from crosstune.core.ranks import Group
from crosstune.distributed.environment import read_ranks

if TYPE_CHECKING:
    from crosstune.loop.stop import StopSignal
    from crosstune.run import RunResult

EXAMPLES = """examples:
  crosstune train
  crosstune train --model_name ./my-model --dataset chats.jsonl --num_epochs 3 --name first-try
  crosstune train --train_type full --lr 2e-5 --precision bf16 --use_gradient_checkpointing
  crosstune train --config run.yaml --max_steps 20        (flags override the file)
  crosstune train --name long --num_epochs 3 --save_steps 100 --resume auto     (run it again to continue after a kill)
  crosstune train --resume runs/long                      (continue a run with its own options)
  crosstune train --emulate mps --machine apple-m1-16gb   (check whether this run would work on that Mac)"""


def run(words: Sequence[str]) -> int:
    parser = Parser("train", description="Fine-tune a model on this machine.", epilog=EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print the summary as JSON on standard output")
    parser.add_argument("--machine", metavar="NAME|FILE", help="with --emulate: the machine to emulate")
    own, config = parse_config(parser, words)
    if config.emulate is not None:
        return _emulate(config, machine=own.machine, as_json=own.json)
    if own.machine is not None:
        raise UserError(
            "train runs on this machine: --machine only works with --emulate.",
            do="crosstune plan --machine shows what another machine would do",
        )

    ranks = read_ranks()
    if ranks is None:
        from crosstune.run import num_processes

        if (size := num_processes(config)) > 1:
            return _launch(words, size)
    elif ranks.launcher is not None:
        from crosstune.distributed.launch import follow

        follow(ranks.launcher)
    from crosstune.distributed.group import connect

    return _train(config, ["crosstune", "train", *words], connect(ranks), as_json=own.json)


def _launch(words: Sequence[str], size: int) -> int:
    from crosstune.distributed.launch import launch, ring_environments

    command = [sys.executable, "-m", "crosstune", "train", *words]
    outcome = launch(command, size=size, environments=ring_environments)
    for line in outcome.lines:
        print(line if line.startswith("  ") else f"crosstune: {line}", file=sys.stderr)
    return outcome.code


def _train(config: Config, command: Sequence[str], group: Group, *, as_json: bool) -> int:
    result, report = show_training(config, group, command=command)
    summary = result.summary
    if as_json and group.ranks.first:
        print_json(summary | {"folder": str(result.folder), "report": str(report) if report else None})
    leave_together(result, group)
    return EXIT_DONE if summary["status"] == "finished" else EXIT_STOPPED


def show_training(
    config: Config,
    group: Group,
    *,
    command: Sequence[str] | None = None,
    observers: Sequence[Observer] = (),
    stop: StopSignal | None = None,
    quiet: bool = False,
) -> tuple[RunResult, Path | None]:
    """Train, show the progress and the outcome unless `quiet`, and write the report; return the run and the report."""
    from crosstune.cli.screen import Screen
    from crosstune.loop.stop import StopSignal
    from crosstune.run import train

    screen = Screen(
        live=config.log_to == "tqdm" and not quiet,
        every=config.log_every_n_steps,
        verbose=config.verbose,
        lines=config.verbose or "log_every_n_steps" in config.asked,
    )
    screen.console.quiet = quiet
    try:
        result = train(config, observers=[screen, *observers], command=command, group=group, stop=stop)
    finally:
        screen.close()
    report = None
    if group.ranks.first:
        with StopSignal().listening():  # the run is over: a signal must not interrupt its report
            report = _write_report(result.folder, screen)
        _print_ending(result.summary, result.folder, report, screen)
    return result, report


def leave_together(result: RunResult, group: Group) -> None:
    """Wait for the other processes of a run, and raise the error that ended it early."""
    if not isinstance(result.failure, PeerLost):
        group.meet()  # under mlx.launch, the first process to exit ends the others
    if result.failure is not None:
        raise result.failure


def _write_report(folder: Path, screen: Any) -> Path | None:
    from crosstune.report import write_report

    try:
        return write_report(folder)
    except UserError as error:  # the run itself succeeded
        screen.console.print("\n".join(error.lines()), markup=False)
        return None


def _emulate(config: Config, *, machine: str | None, as_json: bool) -> int:
    from crosstune.cli.emulated import exit_code, judge, print_verdict

    verdict = judge(config, machine=machine)
    if as_json:
        print_json(verdict.to_json())
    else:
        print_verdict(verdict)
    return exit_code(verdict)


def _print_ending(summary: dict[str, Any], folder: Path, report: Path | None, screen: Any) -> None:
    if summary.get("already_finished"):
        screen.console.print(f"already finished: {folder} (raise --num_epochs or --max_steps to continue)")
    rate = f"{summary['tokens_per_s']:,.0f} tok/s" if summary["tokens_per_s"] else "no step"
    lines = [
        f"{summary['status']} {summary['steps']} steps, {summary['tokens']:,} tokens in "
        f"{duration(summary['seconds'])} ({rate}, peak {size(summary['peak_memory_bytes'])})"
    ]
    lines += _evaluation_lines(summary)
    if report is not None:
        lines.append(f"report   {report}")
    if summary["status"] != "finished":
        lines += _how_to_continue(summary, folder)
    elif summary["result"] and summary.get("generates"):
        lines.append(f'try it   crosstune generate {folder} --prompt "..."')
    for line in lines:
        screen.console.print(line, markup=False)
    sys.stderr.flush()


def _evaluation_lines(summary: dict[str, Any]) -> list[str]:
    """Return a line for each metric: before training, of the best step, and of the last; and which is the result."""
    best, last = summary.get("best"), summary.get("last")
    is_last = best is None or last is None or best["step"] == last["step"]
    lines = []
    for name, after in summary["eval_after"].items():
        before = summary["eval_before"].get(name)
        parts = [f"{before:.4f} before"] if before is not None else []
        if best is not None and last is not None and not is_last:
            parts.append(f"{best['metrics'][name]:.4f} at the best step, {best['step']}")
            parts.append(f"{after:.4f} at the last, {last['step']}")
        else:
            parts.append(f"{after:.4f} after")
        lines.append(f"{name}: {', '.join(parts)}")
    if best is not None and not is_last and summary.get("result_step") == best["step"]:
        lines.append(
            f"result   the weights of step {best['step']}, the best evaluation (--result last keeps the last)"
        )
    return lines


def _how_to_continue(summary: dict[str, Any], folder: Path) -> list[str]:
    if summary["checkpoint"]:
        return [f"continue crosstune train --resume {folder}"]
    return ["continue no checkpoint was saved: run the same command with another --name or with --overwrite"]
