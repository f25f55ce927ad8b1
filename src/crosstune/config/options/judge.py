"""Options for the recipe judge: the verdict, the scale, the splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from crosstune.config.conditions import JUDGE
from crosstune.config.option import Holds, OnResume, option
from crosstune.core.backend import BACKENDS_PACKAGE
from crosstune.core.names import plugin_names


def _backend_names() -> Sequence[str]:
    return ("auto", *plugin_names(BACKENDS_PACKAGE))


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    verdict: str = option(
        "auto",
        "Verdict format: one digit, `Score: N/10` with issues and feedback (score), `[RESULT] n` (result), JSON, or A, B or tie "
        "(winner); auto fits the data",
        choices=("auto", "digit", "score", "result", "json", "winner"),
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    head: str = option(
        "tokens",
        "Where scores come from: the language model's score tokens, or a scalar head (a reward model, torch only)",
        choices=("tokens", "scalar"),
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    score_scale: str = option(
        "0-10",
        "Lowest and highest score of the data, as in 1-5; unset: the column score_scale, or else 0-10",
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    soft_scores: bool = option(
        True,
        "Teach a score between two labels as a distribution over both; false: the nearest label alone",
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    balance_scores: bool = option(
        False,
        "Draw training rows so that every score, or every winner, is as frequent as the others",
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    references: str = option(
        "auto",
        "Reference answers: auto stops if only some rows have one, optional shows those there are, ignore shows none",
        choices=("auto", "optional", "ignore"),
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    group_by: str | None = option(
        None,
        "Column whose equal values stay in one split; unset: the column group, or the text of the task",
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    leaks: str = option(
        "error",
        "Training rows whose group, id or text is also held out: stop with an error, drop them, or allow them",
        choices=("error", "drop", "allow"),
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    test_dataset: str | None = option(
        None,
        "Data to test the trained judge on; unset: the test split of the dataset, or else a tenth of its groups",
        needs=(JUDGE,),
        on_resume=OnResume.DIVIDES_DATA,
        holds=Holds.PATH,
    )
    judge_by: str = option(
        "probabilities",
        "How a judge scores in tests: by the probabilities of the labels, or by generating a verdict",
        choices=("probabilities", "generation"),
        needs=(JUDGE,),
        on_resume=OnResume.FREE,
    )
    eval_backend: str = option(
        "auto",
        "Backend that tests the trained judge; auto: cpu after training on a GPU or mps, else the backend of the training",
        choices=_backend_names,
        needs=(JUDGE,),
        on_resume=OnResume.ONE_START,
    )
