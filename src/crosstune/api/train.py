"""`crosstune.train` fine-tunes a model from Python or a notebook; `crosstune.plan` shows what it would do."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from crosstune.api.arguments import (
    Data,
    OptionValue,
    PathLike,
    SavesTokenizer,
    Written,
    read_config,
    reject_positional,
    rephrase_error,
    rephrase_errors,
)
from crosstune.api.callbacks import Callback, Callbacks, keep_process_state
from crosstune.api.model import Model, load
from crosstune.api.notebook import LiveCell, framed, has_kernel, table
from crosstune.cli.commands.plan import plan_to_json
from crosstune.cli.commands.train import after_restart, finish_together, show_training
from crosstune.cli.plan_lines import LABEL_WIDTH, describe_plan
from crosstune.config.resolve.plan import Adjustment, Plan
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluated
from crosstune.files.json_files import read_json, read_jsonl
from crosstune.files.paths import named_run
from crosstune.planner.find_fit import LongestRow, find_longest
from crosstune.planner.predict import Prediction, predict
from crosstune.runs.check_request import RequestCheck, check_plan


class Run:
    """A run that has ended. `Run(folder)` opens an earlier run, also by its name in the default runs folder."""

    def __init__(self, folder: PathLike, *, summary: dict[str, Any] | None = None) -> None:
        self.folder = Path(named_run(os.fspath(folder))).expanduser()
        if summary is None and not (self.folder / "plan.json").is_file():
            raise UserError(f"{self.folder} is not a run.", why="it has no plan.json.")
        self.summary: dict[str, Any] = (
            summary if summary is not None else read_json(self.folder / "summary.json")
        )
        """The contents of summary.json; empty for a run that is running or was killed."""

    @property
    def status(self) -> str:
        """`finished`, `stopped` or `failed`; `unfinished` for a run that is running or was killed."""
        return str(self.summary.get("status", "unfinished"))

    @property
    def stop_reason(self) -> str | None:
        """Why the run stopped: a signal, the time limit, or a callback's reason."""
        return self.summary.get("stop_reason")

    @property
    def result(self) -> Path | None:
        """The folder of the trained adapter or model."""
        return Path(name) if (name := self.summary.get("result")) else None

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint."""
        return Path(name) if (name := self.summary.get("checkpoint")) else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, one per step, with `eval_loss` and other `eval_` metrics at evaluated steps."""
        evaluated: dict[int, dict[str, Any]] = {}
        for event in self.events:
            if event.get("kind") == Evaluated.kind and event.get("step") is not None:
                found = {f"eval_{name}": value for name, value in (event.get("metrics") or {}).items()}
                evaluated.setdefault(event["step"], {}).update(found)
        return [row | evaluated.get(row["step"], {}) for row in read_jsonl(self.folder / "metrics.jsonl")]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The rows of events.jsonl: evaluations with their samples, warnings, checkpoints."""
        return read_jsonl(self.folder / "events.jsonl")

    def report(self) -> Path:
        """Write the HTML report of the run and return its path."""
        from crosstune.report import write_report

        return write_report(self.folder)

    def load(self, *, backend: str = "auto", precision: str = "auto", progress: bool = True) -> Model:
        """Open the trained model."""
        return load(self.folder, backend=backend, precision=precision, progress=progress)

    @functools.cached_property
    def _model(self) -> Model:
        return self.load()

    def generate(
        self,
        prompt: str,
        *,
        system: str = "",
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> str:
        """Answer a prompt with the trained model and keep it loaded; `load()` gives more control."""
        return self._model.generate(
            prompt, system=system, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
        )

    def _repr_html_(self) -> str:
        """Show the result and the curves in a notebook."""
        from crosstune.report import load_run, render

        return framed(render(load_run(self.folder), template="cell.html.jinja"))

    def __repr__(self) -> str:
        facts = [f"status={self.status!r}"]
        for name in ("steps", "final_loss", "eval_loss"):
            if self.summary.get(name) is not None:
                facts.append(f"{name}={self.summary[name]:.6g}")
        return f"Run({str(self.folder)!r}, {', '.join(facts)})"


def train(
    *given: NoReturn,
    dataset: Data | None = None,
    eval_dataset: Data | None = None,
    tokenizer: PathLike | SavesTokenizer | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **options: OptionValue,
) -> Run:
    """Fine-tune a model. `options` are the options of `crosstune train`; `crosstune options` lists them.

    A dataset is a path, a name, a list of rows, or a `datasets.Dataset`; a tokenizer is a folder or a fast transformers
    tokenizer. Ctrl-C and callbacks stop the run after the current step, with a checkpoint. `progress=False` prints nothing.
    """
    from crosstune.distributed.environment import read_ranks
    from crosstune.distributed.group import connected, errors_with_rank
    from crosstune.loop.stop import StopSignal

    reject_positional("train", given)
    stop, written = StopSignal(), Written()
    with rephrase_errors(written):
        called = Callbacks(callbacks, stop)
        data = {"dataset": dataset, "eval_dataset": eval_dataset, "tokenizer": tokenizer}
        config = read_config(options, written=written, **data)
        with keep_process_state(), connected(config, read_ranks(config)) as group, errors_with_rank(group):
            try:
                cell = LiveCell() if progress and has_kernel() else None
                result, _ = show_training(
                    after_restart(config, group),
                    group,
                    observers=[*([cell] if cell else []), called],
                    stop=stop,
                    quiet=not progress,
                    line=cell,
                )
                finish_together(result, group)
            except UserError as error:
                if called.error is not None:
                    raise called.error from error
                raise
    if called.error is not None:
        raise called.error
    return Run(result.folder, summary=result.summary)


@dataclass(frozen=True, kw_only=True)
class PlannedMemory:
    """Estimated memory of a training step, and total memory of the device."""

    estimated_bytes: int | None
    """None if the shape of the model is unknown."""
    total_bytes: int


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport:
    """A plan for a machine with its problems; prints like `crosstune plan`."""

    plan: Plan
    checked: RequestCheck

    @property
    def prediction(self) -> Prediction | None:
        """Parameters, memory by part, speed and time; None if the shape of the model is unknown."""
        return predict(self.plan, data=self.checked.data)

    @property
    def longest_row(self) -> LongestRow | None:
        """The longest row whose step fits; None if the shape of the model is unknown."""
        return find_longest(self.plan)

    @property
    def problems(self) -> Sequence[UserError]:
        """The errors that `train` would raise for this request."""
        return tuple(self.checked.problems)

    @property
    def warnings(self) -> Sequence[str]:
        return tuple(self.checked.warnings)

    @property
    def not_checked(self) -> Sequence[str]:
        return tuple(self.checked.not_checked)

    @property
    def memory(self) -> PlannedMemory:
        plan = self.plan
        return PlannedMemory(
            estimated_bytes=plan.estimated_bytes, total_bytes=plan.backend.memory_total_bytes
        )

    @property
    def options(self) -> dict[str, Any]:
        """The resolved options."""
        return self.plan.config.options()

    @property
    def adjustments(self) -> Sequence[Adjustment]:
        """Automatic choices, changes to the request, and warnings."""
        return self.plan.adjustments

    def to_json(self) -> dict[str, Any]:
        return plan_to_json(self.plan, self.checked, self.prediction)

    def _repr_html_(self) -> str:
        """Show the lines of the plan as a table in a notebook."""
        return table(describe_plan(self.plan, self.checked, self.prediction), width=LABEL_WIDTH)

    def __repr__(self) -> str:
        return "\n".join(describe_plan(self.plan, self.checked, self.prediction))


def plan(
    *given: NoReturn,
    dataset: Data | None = None,
    eval_dataset: Data | None = None,
    tokenizer: PathLike | SavesTokenizer | None = None,
    machine: PathLike | None = None,
    **options: OptionValue,
) -> PlanReport:
    """Plan a run with the arguments of `train`, for this machine or for `machine`: a profile or a doctor report."""
    from crosstune.distributed.environment import read_ranks
    from crosstune.machines.probe import load_machine

    reject_positional("plan", given)
    written = Written()
    with rephrase_errors(written):
        data = {"dataset": dataset, "eval_dataset": eval_dataset, "tokenizer": tokenizer}
        config = read_config(options, written=written, **data)
        if config.emulate is not None:
            raise UserError(
                "plan() does not support --emulate.", do="use the command `crosstune plan --emulate`"
            )
        if machine is None:
            read_ranks(config)  # reject what train rejects
        where = load_machine(str(machine)) if machine is not None else None
        found, checked = check_plan(config, machine=where)
    for problem in checked.problems:
        rephrase_error(problem, written)
    return PlanReport(plan=found, checked=checked)
