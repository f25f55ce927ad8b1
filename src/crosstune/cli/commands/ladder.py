"""`crosstune ladder`: try optimizations one by one, measure each, and keep the changes that help."""

from __future__ import annotations

import argparse
import shlex
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import Parser, announce_command, at_least, parse_config, print_json
from crosstune.cli.terminal.figures import duration
from crosstune.config.recipe_spec import trained_name
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE, EXIT_STOPPED, UserError
from crosstune.files.paths import shown_path

if TYPE_CHECKING:
    from crosstune.ladder.climb import Climbed, Step

EXAMPLES = """examples:
  crosstune ladder --model_name ./my-model --dataset chats.jsonl --name faster
  crosstune ladder --config run.yaml --steps 50 --goal memory
  crosstune ladder --config run.yaml --rungs larger_batch,fused_optimizer,packing
  crosstune train --config runs/faster/train.yaml                  (train with the kept changes)

Each rung changes some options. Child processes measure it in alternation (A B B A) against the changes kept so far. It is
kept if the loss stays within the rung's tolerance and the gain in speed or memory exceeds the noise between trials. Repeat the
command to continue a stopped ladder. `crosstune ladder --rungs list` lists the rungs."""
READ_S = 1.0
"""A faster trial was read from disk, so it does not predict the remaining time."""
FEW_STEPS = 15
"""Fewer steps give no reliable verdict on speed."""


def make_parser() -> Parser:
    parser = Parser(
        "ladder",
        description="Try optimizations of a run one by one, measure each, and keep the changes that help.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    steps = "training steps per trial (default 30)"
    add("--steps", type=at_least(2), default=30, metavar="N", help=steps)
    rungs = "rungs to try, in this order (default: all); `list` prints them"
    add("--rungs", metavar="A,B,...", help=rungs)
    goal = (
        "speed (default): keep changes that are faster, or use less memory at the same speed; memory: keep changes that "
        "use less memory, or are faster with the same memory"
    )
    add("--goal", choices=("speed", "memory"), default="speed", help=goal)
    limit = "time limit per trial (default 1800)"
    add("--trial_limit", type=at_least(1.0), default=1800.0, metavar="SECONDS", help=limit)
    return parser


def run(words: Sequence[str]) -> int:
    own, config = parse_config(make_parser(), words)
    from crosstune.ladder.rungs import all_rungs

    if own.rungs == "list":
        for name, rung in all_rungs().items():
            print(f"{name:<24} {rung.title} ({rung.gain}; {rung.promise.text})")
        return EXIT_DONE
    names = _chosen(own.rungs, list(all_rungs()))
    from crosstune.files.run_lock import hold
    from crosstune.files.run_record import move_aside
    from crosstune.ladder.climb import make_request
    from crosstune.runs.trials import check_same_request, check_trial_request

    folder = Path(config.output_dir).expanduser() / (config.name or "ladder")
    with hold(folder):
        announce_command("ladder", trained_name(config), "probing the machine")
        check_trial_request(config, kind="ladder")
        if config.overwrite and folder.exists():
            move_aside(folder)
        request = make_request(config, rungs=names, steps=own.steps, goal=own.goal)
        check_same_request(folder, request, kind="ladder")
        return _climb(own, config, names=names, folder=folder)


def _climb(own: argparse.Namespace, config: Config, *, names: Sequence[str], folder: Path) -> int:
    """Measure, print and write the result; return the exit code. The caller holds the folder's lock."""
    from crosstune.cli.terminal.output import Output
    from crosstune.ladder.climb import STATE, Ladder
    from crosstune.ladder.trial import Trials
    from crosstune.loop.stop import StopSignal

    output = Output()
    if own.steps < FEW_STEPS:
        output.line(f"note     {own.steps} steps are too few for a reliable verdict on speed; use 30 or more")
    if any((folder / "trials").glob("*.yaml")):
        output.line("continue an earlier ladder: finished trials with the same options are reused")
    with StopSignal().listening() as stop:
        trials = Trials(
            folder=folder / "trials",
            steps=own.steps,
            warmup=min(own.steps - 1, max(2, own.steps // 6)),
            limit_s=own.trial_limit,
            should_stop=lambda: stop.requested,
        )
        shown = _Progress(output)
        ladder = Ladder(
            asked=config.options_asked(),
            rungs=names,
            trials=trials,
            goal=own.goal,
            on_step=shown.step,
            on_trial=shown.trial,
        )
        try:
            found = ladder.climb()
        except KeyboardInterrupt:
            again = "again, without --overwrite," if config.overwrite else "again"
            output.line(f"stopped  {stop.reason or 'Ctrl-C'}; run the command {again} to continue")
            return EXIT_STOPPED
    import yaml

    from crosstune.files.atomic_files import write_text
    from crosstune.files.json_files import write_json
    from crosstune.report.trial_pages import write_ladder_page

    write_json(folder / STATE, found.to_json())
    options = {name: value for name, value in found.options.items() if name not in ("name", "overwrite")}
    write_text(folder / "train.yaml", yaml.safe_dump(options, sort_keys=False, allow_unicode=True))
    page = write_ladder_page(folder, command=_train_command(folder))
    _print_result(output, found, folder, page)
    if own.json:
        print_json(found.to_json() | {"folder": str(folder)})
    return EXIT_DONE


class _Progress:
    """Print the current trial and the time left."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.begun: float | None = None
        self.times: list[float] = []

    def trial(self, name: str, left: int) -> None:
        now = time.monotonic()
        if self.begun is not None and now - self.begun > READ_S:
            self.times.append(now - self.begun)
        self.begun = now
        rest = ""
        if len(self.times) > 1 and left > 1:
            rest = f", at most {duration(statistics.median(self.times) * left)} left"
        self.output.line(f"trial    {name}{rest}")

    def step(self, step: Step) -> None:
        label = {"kept": "kept", "rolled back": "undone", "does not apply": "no use"}[step.outcome]
        changes = [f"{key}={str(v).lower() if isinstance(v, bool) else v}" for key, v in step.change.items()]
        change = f" ({', '.join(changes)})" if changes else ""
        self.output.line(f"{label:<8} {step.rung}{change}: {step.why}")


def _chosen(text: str | None, known: Sequence[str]) -> list[str]:
    from crosstune.core.names import unknown_name

    if text is None:
        return list(known)
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    if not names:
        raise UserError("--rungs is empty.", do=f"the rungs: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise unknown_name("rung", name, known)
    return list(dict.fromkeys(names))


def _train_command(folder: Path) -> str:
    return f"crosstune train --config {shlex.quote(shown_path(folder / 'train.yaml'))}"


def _why_none(found: Climbed) -> str:
    """Return why no change was kept. A failed change was not measured, so it is not called worse."""
    tried = [step for step in found.steps if step.outcome == "rolled back"]
    num_measured = sum(step.comparison is not None and step.comparison.failed is None for step in tried)
    if not tried:
        return "none applies to this run"
    if not num_measured:
        return "no change could be measured; the lines above say why"
    rest = f"; {len(tried) - num_measured} could not be measured" if num_measured < len(tried) else ""
    return f"no measured change was an improvement{rest}"


def _print_result(output: Any, found: Climbed, folder: Path, page: Path) -> None:
    from crosstune.cli.terminal.figures import size
    from crosstune.ladder.trial import median

    kept = [step for step in found.steps if step.outcome == "kept"]
    output.line("")
    if found.ends is None:
        output.line(f"result   no rung was kept: {_why_none(found)}")
    elif (failed := found.ends.failed) is not None:
        output.line(
            f"result   {len(kept)} kept, but the trial {failed.name} at the end failed: {failed.error}"
        )
    else:
        ends = found.ends
        rates = [median([ends.rate(trial) for trial in side]) for side in (ends.base, ends.new)]
        unit = "tokens per second of CPU time" if ends.by_cpu_time else "tok/s"
        peaks = [median([float(trial.peak_bytes) for trial in side]) for side in (ends.base, ends.new)]
        output.line(
            f"result   {len(kept)} kept: {rates[1]:,.0f} {unit} instead of {rates[0]:,.0f} (x {ends.speed:.2f}), "
            f"peak memory {size(peaks[1])} instead of {size(peaks[0])} (x {ends.memory:.2f})"
        )
    for criterion in found.criteria:
        output.line(f"{criterion.met:<11} {criterion.what}: {criterion.measured}")
    output.line(f"page     {shown_path(page)}")
    output.line(f"train    {_train_command(folder)}")
