"""`crosstune sweep`: run trials with different values of options, and find the best."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, announce_command, at_least, parse_config, print_json
from crosstune.cli.terminal.figures import duration, figure
from crosstune.config.recipe_spec import trained_name
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, UserError
from crosstune.files.paths import shown_path

if TYPE_CHECKING:
    from crosstune.sweep.choose import Space, Trial
    from crosstune.sweep.run import Sweep

EXAMPLES = """examples:
  crosstune sweep --over lr=1e-4..1e-3:log --over lora_rank=8,16,32 --trials 12 --model_name ./my-model --name rates
  crosstune sweep --over lr=1e-5,1e-4 --over train_type=lora,dora --metric eval_exact_match --config run.yaml
  crosstune sweep --over lr=1e-4..1e-3:log --trials 24 --name rates     (repeat the command: more trials, or after a stop)
  crosstune train --config runs/rates/best.yaml                         (train with the best values)

Each trial is an ordinary run in NAME/trials. Optuna proposes values based on earlier trials. A trial stops early if its
evaluations are worse than the median of the finished trials at the same step."""
SHOW_S = 1.0
EVALUATIONS = 5
"""Evaluations in each trial without --eval_steps."""


def make_parser() -> Parser:
    parser = Parser(
        "sweep",
        description="Run trials with different values of options, and find the best.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    over = "vary an option: NAME=LOW..HIGH, NAME=LOW..HIGH:log, or NAME=A,B,C; repeat it for more options"
    add("--over", action="append", default=[], metavar="NAME=VALUES", help=over)
    metric = "metric that ranks the trials (default eval_loss)"
    add("--metric", default="eval_loss", metavar="NAME", help=metric)
    goal = "better direction of the metric; required if the name of the metric does not tell it"
    add("--goal", choices=("min", "max"), help=goal)
    add("--trials", type=at_least(1), default=12, metavar="N", help="number of trials (default 12)")
    parallel = "number of trials that run at the same time (default: one per device)"
    add("--parallel", type=at_least(1), metavar="N", help=parallel)
    pruning = "stop trials that are worse than the median (default), or none"
    add("--pruning", choices=("median", "none"), default="median", help=pruning)
    return parser


def run(words: Sequence[str]) -> int:
    own, config = parse_config(make_parser(), words)
    from crosstune.cli.terminal.output import Output
    from crosstune.files.run_lock import hold
    from crosstune.loop.stop import StopSignal
    from crosstune.sweep.choose import check_optuna, read_space

    if not own.over:
        raise UserError(
            "There is nothing to vary.", do="pass --over NAME=VALUES, such as --over lr=1e-5..1e-3:log"
        )
    space = read_space(own.over)
    _check_options(config, space)
    maximize = _is_maximized(own)
    check_optuna()
    folder, output = Path(config.output_dir).expanduser() / (config.name or "sweep"), Output()
    with hold(folder), StopSignal().listening() as stop:
        sweep = _open(own, config, space=space, maximize=maximize, folder=folder, output=output)
        sweep.should_stop = lambda: stop.requested
        shown = _Progress(output, sweep)
        sweep.on_start, sweep.on_end, sweep.on_poll = shown.start, shown.end, shown.poll
        try:
            sweep.run()
        except KeyboardInterrupt:
            again = "again, without --overwrite," if config.overwrite else "again"
            output.line(f"stopped  {stop.reason or 'Ctrl-C'}; run the command {again} to continue")
            return EXIT_STOPPED
        finally:
            shown.line.clear()
        _write_result(output, sweep, as_json=own.json)
    return EXIT_DONE


def _check_options(config: Config, space: Space) -> None:
    for name in space:
        if config.sources.get(name, "").startswith("flag"):
            raise UserError(f"{name} is set and varied.", do=f"remove --{name}, or its --over")
    for name, why in (
        ("skip_eval", "it compares evaluations."),
        ("time_limit", "a trial would end before it is done; --max_steps limits all trials alike."),
    ):
        if getattr(config, name):
            raise UserError(f"A sweep cannot be combined with --{name}.", why=why, do=f"remove --{name}")


def _is_maximized(own: argparse.Namespace) -> bool:
    from crosstune.report.formatting import display_of

    own.metric = own.metric.removeprefix("eval_")
    better = {"max": 1, "min": -1}.get(own.goal or "", display_of(own.metric, []).better)
    if not better:
        raise UserError(
            f"--metric eval_{own.metric} has no known better direction.", do="pass --goal min or --goal max"
        )
    return better > 0


def _open(
    own: argparse.Namespace, config: Config, *, space: Space, maximize: bool, folder: Path, output: Any
) -> Sweep:
    """Check the request as `train` does, and open its sweep: a new one, or one that was stopped."""
    from crosstune.cli.terminal.output import WARNING
    from crosstune.config.load import make_config
    from crosstune.files.run_record import move_aside
    from crosstune.planner.gather import with_all_devices
    from crosstune.runs.trials import PLACE, check_same_request, check_trial_request
    from crosstune.sweep.choose import num_combinations
    from crosstune.sweep.run import Sweep, device_slots

    announce_command("sweep", trained_name(config), "probing the machine")
    asked = {k: v for k, v in config.options_asked().items() if k not in (*PLACE, "resume", *space)}
    first = {name: dimension.first for name, dimension in space.items()}
    if config.resume != "auto":
        first["resume"] = config.resume
    plan, checked = check_trial_request(with_all_devices(make_config(**{**asked, **first})), kind="sweep")
    if checked.data is not None and not checked.data.evaluates:
        raise UserError(
            "A sweep compares evaluations, and there is nothing to evaluate on.",
            why="no rows are held out: the data is too small for --eval_fraction and --eval_samples.",
            do="raise --eval_fraction, or pass --eval_dataset",
        )
    if config.overwrite and folder.exists():
        move_aside(folder)
    goal = {"metric": own.metric, "goal": "max" if maximize else "min", "pruning": own.pruning}
    check_same_request(folder, {"options": asked, "over": own.over, **goal}, kind="sweep")
    for each in plan.adjustments:
        if each.kind == "warning" and each.option in space:
            output.line(f"note     {each.sentence()}", style=WARNING)
    prunes = own.pruning == "median"
    if prunes and not config.eval_steps:
        num_steps = checked.data.num_steps if checked.data is not None else config.max_steps
        if num_steps > 0:
            asked["eval_steps"] = max(1, num_steps // EVALUATIONS)
        else:
            output.line("note     no trial stops early: set --eval_steps, since the steps are not known yet")
    sweep = Sweep(
        folder=folder,
        space=space,
        metric=own.metric,
        maximize=maximize,
        num_trials=int(min(own.trials, num_combinations(space))),
        asked=asked,
        seed=config.seed,
        prunes=prunes,
        slots=device_slots(plan, own.parallel),
    )
    if done := len(sweep.ended()):
        output.line(f"continue an earlier sweep: {done} of {max(done, sweep.num_trials)} trials have ended")
    return sweep


def _write_result(output: Any, sweep: Sweep, *, as_json: bool) -> None:
    import yaml

    from crosstune.cli.terminal.output import Column, table_lines, terminal_width
    from crosstune.files.atomic_files import write_text
    from crosstune.report.trial_pages import SWEEP_FILE, write_trials_page
    from crosstune.sweep.choose import num_combinations

    best, trials, folder = sweep.best, sweep.ranked, sweep.folder
    assert best is not None, "the sweep raises if no trial finished"
    sweep.write()
    options = yaml.safe_dump(sweep.options_of(best), sort_keys=False, allow_unicode=True)
    write_text(folder / "best.yaml", options)
    command = f"crosstune train --config {shlex.quote(shown_path(folder / 'best.yaml'))}"
    page = write_trials_page(folder / SWEEP_FILE, command=command)

    def column(title: str, cells: Sequence[str], rank: int = 0) -> Column:
        return Column(title=title, cells=cells, right=title not in ("trial", "status"), rank=rank)

    columns = [
        column("trial", [trial.name for trial in trials]),
        column("status", [trial.status for trial in trials]),
        column(f"eval_{sweep.metric}", [_figure(trial.value) for trial in trials]),
        *(column(name, [_value(trial.params[name]) for trial in trials]) for name in sweep.space),
        column("step", [str(trial.step or "-") for trial in trials], rank=2),
        column("time", [duration(trial.seconds) for trial in trials], rank=1),
    ]
    for line in ("", *table_lines(columns, width=terminal_width()), ""):
        output.line(line)
    if len(trials) == num_combinations(sweep.space):
        output.line("note     all combinations were tried")
    output.line(f"best     {best.name}: eval_{sweep.metric} {_figure(best.value)} with {_values(best)}")
    output.line(f"run      {shown_path(folder / 'trials' / best.name)}")
    output.line(f"page     {shown_path(page)}")
    output.line(f"train    {command}")
    if as_json:
        print_json(sweep.to_json() | {"folder": str(folder), "command": command})


class _Progress:
    """Print each trial as it starts and ends, and on a terminal a bar with the steps and the time left."""

    def __init__(self, output: Any, sweep: Sweep) -> None:
        from crosstune.cli.terminal.screen import LiveLine

        self.output, self.sweep, self.line = output, sweep, LiveLine(output.console)
        self.before, self.begun, self.shown = len(sweep.ended()), time.monotonic(), 0.0

    def start(self, trial: Trial) -> None:
        self.output.line(f"{trial.name}  {trial.number + 1} of {self._total}: {_values(trial)}")

    def end(self, trial: Trial) -> None:
        name = f"eval_{self.sweep.metric}"
        said = {
            "finished": f"{name} {_figure(trial.value)}",
            "pruned": f"stopped early: {name} {_figure(trial.value)} at step {trial.step}",
        }.get(trial.status, f"failed: {trial.error}")
        mark = ", the best so far" if trial is self.sweep.best else ""
        left = f", about {time_left} left" if (time_left := self._left(0.0)) else ""
        self.output.line(f"  {trial.name}  {said}{mark}{left}", style=None if mark else "dim")

    def poll(self) -> None:
        from crosstune.cli.terminal.screen import BarLine

        if not self.output.is_terminal or time.monotonic() - self.shown < SHOW_S:
            return
        self.shown, running = time.monotonic(), self.sweep.steps_of_running()
        part, ended = sum(done / steps for done, steps in running.values()), len(self.sweep.ended())
        figures = [f"left {time_left}"] if (time_left := self._left(part)) else []
        figures += [f"{name} step {done}/{steps}" for name, (done, steps) in running.items()]
        title = f"trials {ended}/{self._total}"
        self.line.show(BarLine(title=title, share=(ended + part) / self._total, figures=figures))

    @property
    def _total(self) -> int:
        return max(self.sweep.num_trials, len(self.sweep.trials))

    def _left(self, part: float) -> str:
        """Return the time left, empty if unknown or zero; `part` is the finished part of the running trials, in trials."""
        ended = len(self.sweep.ended())
        done, left = ended - self.before + part, self._total - ended - part
        return duration((time.monotonic() - self.begun) / done * left) if done > 0 and left > 0 else ""


def _values(trial: Trial) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in trial.params.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _figure(value: float | None) -> str:
    return "-" if value is None else figure(value, digits=4)
