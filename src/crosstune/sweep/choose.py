"""Read the ranges and lists that a sweep varies, choose the values of trials with Optuna, and prune trials.

Each choice depends only on the seed and on the ended trials, so a killed sweep continues as if nothing had happened.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from crosstune.config.option_names import find_option
from crosstune.config.values import convert_value
from crosstune.core.errors import UserError, raise_all, shown

if TYPE_CHECKING:
    import optuna

SAME_IN_ALL = frozenset(
    {
        "name",
        "output_dir",
        "overwrite",
        "resume",
        "emulate",
        "skip_eval",
        "eval_steps",
        "time_limit",
        "world_size",
    }
)
DIGITS = 4
"""Significant digits of a number drawn from a range."""
_MOST_LISTED = 100_000
"""Combinations. With more, random draws find one that was not tried."""
_FORMS = "write a range as NAME=LOW..HIGH or NAME=LOW..HIGH:log, and a list as NAME=A,B,C"


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """A varied option: its choices, or a range of numbers."""

    name: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    is_log: bool = False
    is_integer: bool = False

    @property
    def values(self) -> Sequence[Any] | None:
        """All values; None for a range of real numbers."""
        return self.choices or (range(int(self.low), int(self.high) + 1) if self.is_integer else None)

    @property
    def num_values(self) -> float:
        return len(self.choices) or (self.high - self.low + 1 if self.is_integer else math.inf)

    @property
    def first(self) -> Any:
        return self.choices[0] if self.choices else self.low

    def rounded(self, value: Any) -> Any:
        """Round a drawn number, so that people can read it."""
        if self.values is not None:
            return value
        return min(self.high, max(self.low, float(f"{value:.{DIGITS}g}")))


Space = Mapping[str, Dimension]
"""Option name -> dimension, in the order of the request."""


def read_space(texts: Sequence[str]) -> Space:
    """Read the values of --over; raise all problems at once."""
    space, problems = dict[str, Dimension](), list[UserError]()
    for text in texts:
        try:
            found = _read(text, f"--over {shown(text)[1:-1]}")
            if found.name in space:
                raise UserError(f"--over has {found.name} twice.", do="keep one of them")
            space[found.name] = found
        except UserError as error:
            problems.append(error)
    raise_all(problems)
    return space


def num_combinations(space: Space) -> float:
    """Return the number of combinations of values; infinite if a range of real numbers is among them."""
    return math.prod(dimension.num_values for dimension in space.values())


def combinations(space: Space) -> list[dict[str, Any]]:
    """Return all combinations of values; none if there are too many for a list."""
    if num_combinations(space) > _MOST_LISTED:
        return []
    values = [dimension.values or () for dimension in space.values()]
    return [dict(zip(space, each, strict=True)) for each in itertools.product(*values)]


def _read(text: str, where: str) -> Dimension:
    key, _, values = text.partition("=")
    named = find_option(key.strip(), where) if values.strip() else None
    if named is None:
        raise UserError(f"{where} has no values.", do=_FORMS)
    option = named.option
    if option.name in SAME_IN_ALL:
        raise UserError(
            f"A sweep cannot vary {option.name}: it is the same in all trials.", do="vary another option"
        )
    if option.type not in (int, float) or ".." not in values:
        parts = values.split(";" if ";" in values else ",")  # a value may contain commas
        choices = [option.written(convert_value(option, part.strip(), where)) for part in parts]
        if len(set(choices)) == 1:
            raise UserError(f"{where} has a single value.", do=f"pass it as --{option.name}, or add values")
        return Dimension(name=option.name, choices=tuple(dict.fromkeys(choices)))
    is_log = values.strip().endswith(":log")
    ends = values.strip().removesuffix(":log").split("..")
    if len(ends) != 2 or not all(ends):
        raise UserError(f"{where} is not a range with two bounds.", do=_FORMS)
    low, high = (convert_value(option, end, where) for end in ends)
    if low >= high:
        raise UserError(f"{where} is an empty range: {low:g} is not below {high:g}.", do="swap the bounds")
    if is_log and low <= 0:
        raise UserError(f"{where} cannot be logarithmic.", do="use a lower bound above 0, or remove :log")
    return Dimension(name=option.name, low=low, high=high, is_log=is_log, is_integer=option.type is int)


NUM_RANDOM = 5
"""Number of random trials before Optuna chooses."""
FEWEST_TO_PRUNE = 3
"""Finished trials below which none is pruned."""
FEWEST_FOR_IMPORTANCE = 4
_ATTEMPTS = 20
Status = Literal["started", "finished", "pruned", "failed"]


@dataclass(kw_only=True)
class Trial:
    """The values and the outcome of a trial."""

    number: int
    params: dict[str, Any]
    known: list[int]
    """The trials that had ended when the values were chosen."""
    status: Status = "started"
    value: float | None = None
    """The metric of the result; of a pruned trial, at the evaluation that stopped it."""
    step: int | None = None
    evaluations: dict[str, float | None] = field(default_factory=dict)
    """Step -> metric, during the training."""
    seconds: float = 0.0
    error: str = ""
    """Why it failed."""

    @property
    def name(self) -> str:
        return f"trial-{self.number:03d}"

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}


def check_optuna() -> None:
    if importlib.util.find_spec("optuna") is None:
        raise UserError("A sweep needs Optuna.", do="pip install 'crosstune[sweep]'")


def choose(space: Space, trials: Sequence[Trial], *, seed: int, maximize: bool) -> dict[str, Any] | None:
    """Return the values of the next trial; None if all combinations were tried."""
    study = _study(space, trials, seed=seed, maximize=maximize)
    tried = [trial.params for trial in trials]
    distributions = {name: _distribution(dimension) for name, dimension in space.items()}
    for _ in range(_ATTEMPTS):
        drawn = study.ask(distributions).params
        params = {name: dimension.rounded(drawn[name]) for name, dimension in space.items()}
        if params not in tried:
            return params
    left = [params for params in combinations(space) if params not in tried]
    return random.Random(f"{seed} {len(trials)}").choice(left) if left else None


def pruned_at(
    evaluations: Mapping[int, float | None], others: Sequence[Trial], *, maximize: bool
) -> int | None:
    """Return the evaluation, from the second on, at which a trial's best value is worse than the median of the finished
    trials at the same step; None to keep it."""
    finished = [trial for trial in others if trial.status == "finished"]
    sign, best = (-1 if maximize else 1), math.inf
    for place, (step, value) in enumerate(sorted(evaluations.items())):
        best = min(best, math.inf if value is None else sign * value)
        at = [sign * other for trial in finished if (other := trial.evaluations.get(str(step))) is not None]
        if place and len(at) >= FEWEST_TO_PRUNE and best > statistics.median(at):
            return step
    return None


def importances(space: Space, trials: Sequence[Trial], *, maximize: bool) -> dict[str, float]:
    """Return how much each option explains of the differences between finished trials; empty if there are too few trials."""
    if sum(trial.status == "finished" for trial in trials) < FEWEST_FOR_IMPORTANCE or len(space) < 2:
        return {}
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    study = _study(space, trials, seed=0, maximize=maximize)
    return get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())


def _study(space: Space, trials: Sequence[Trial], *, seed: int, maximize: bool) -> optuna.Study:
    """Return a study that knows all trials, including running ones, so that parallel trials differ."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some arguments are marked as experimental
        sampler = optuna.samplers.TPESampler(
            seed=random.Random(f"{seed} {len(trials)}").getrandbits(32),
            n_startup_trials=NUM_RANDOM,
            multivariate=True,
            constant_liar=True,
        )
    study = optuna.create_study(direction="maximize" if maximize else "minimize", sampler=sampler)
    for trial in trials:
        # A failed trial ranks below all others: it may have diverged or run out of memory.
        state = {"started": TrialState.RUNNING, "finished": TrialState.COMPLETE}.get(
            trial.status, TrialState.PRUNED
        )
        steps = {int(step): value for step, value in trial.evaluations.items() if value is not None}
        study.add_trial(
            optuna.trial.create_trial(
                state=state,
                value=trial.value if trial.status == "finished" else None,
                params=trial.params,
                distributions={name: _distribution(space[name]) for name in trial.params},
                intermediate_values=steps if trial.status == "pruned" else {},
            )
        )
    return study


def _distribution(dimension: Dimension) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choices:
        return CategoricalDistribution(dimension.choices)
    if dimension.is_integer:
        return IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
