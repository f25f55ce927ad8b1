"""`crosstune.plan`: show what `train` would do with the same arguments, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from crosstune.api.notebook import table
from crosstune.cli.commands.plan import plan_to_json
from crosstune.cli.plan_lines import LABEL_WIDTH, describe_plan
from crosstune.config.resolve.plan import Adjustment, Plan
from crosstune.core.errors import UserError
from crosstune.planner.longest import LongestRow, find_longest
from crosstune.planner.predict import Prediction, predict
from crosstune.runs.check_request import RequestCheck, check_plan


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
