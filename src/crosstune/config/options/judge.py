"""Options of the judge recipe: the verdict, the scale, the splits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import Condition, with_recipe
from crosstune.config.option import OnResume, StringKind, backend_choices, option

JUDGE = with_recipe("judge")
SCALAR_HEAD = Condition("`--head scalar`", lambda now: now["head"] == "scalar")
LABELS = Condition("", lambda now: now["head"] != "scalar", "with --head scalar, which predicts a number")

_option = partial(option, needs=(JUDGE,), on_resume=OnResume.MAY_CHANGE_DATA)


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    verdict: str = _option(
        "auto",
        "Verdict format: one digit, `Score: N/10` with issues and feedback (score), `[RESULT] n` (result), JSON, or A, B "
        "or tie (winner); auto: chosen to match the data",
        choices=("auto", "digit", "score", "result", "json", "winner"),
    )
    head: str = _option(
        "tokens",
        "Source of the verdicts: the language model's label tokens, or a scalar head that predicts scores (from scored answers) or rewards "
        "(from pairs: a reward model)",
        choices=("tokens", "scalar"),
    )
    center_rewards: float = option(
        0.0,
        "Weight of the penalty (r_better + r_worse)^2 per pair, which keeps the mean reward near 0; usual: 0.01",
        high=1e6,
        needs=(JUDGE, SCALAR_HEAD),
    )
    score_scale: str = _option(
        "0-10", "Lowest and highest score in the data, as in 1-5; unset: the column score_scale, or else 0-10"
    )
    soft_scores: bool = _option(
        True,
        "Train a score between two labels as a distribution over both; false: use the nearest label only",
        needs=(JUDGE, LABELS),
    )
    balance_scores: bool = _option(
        False, "Sample training rows so that all scores, or all winners, occur equally often"
    )
    references: str = _option(
        "auto",
        "Reference answers: auto shows them if all rows have one and stops if only some do, optional shows those that "
        "exist, ignore shows none",
        choices=("auto", "optional", "ignore"),
    )
    group_by: str | None = _option(
        None,
        "Column by which rows are grouped: a group is never split across splits; unset: the column group, or the task",
    )
    leaks: str = _option(
        "error",
        "Handling of training rows whose group, id or text is also held out: stop with an error, drop them, or allow them",
        choices=("error", "drop", "allow"),
    )
    test_dataset: str | None = _option(
        None,
        "Data to test the trained judge on; unset: the dataset's test split, or else a tenth of its groups",
        holds=StringKind.PATH,
    )
    judge_by: str = _option(
        "probabilities",
        "How a judge scores in tests: from the probabilities of the labels, or by generating a verdict",
        choices=("probabilities", "generation"),
        needs=(JUDGE, LABELS),
        on_resume=OnResume.FREE,
    )
    eval_backend: str = _option(
        "auto",
        "Backend for testing the trained judge; auto: cpu after training on a GPU or mps, otherwise the training backend",
        choices=backend_choices,
        on_resume=OnResume.ONE_START,
    )
