"""Options of the distill recipe: the teacher, the divergence from it, and the student's own answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import Condition, with_recipe
from crosstune.config.option import OnResume, StringKind, option

DISTILL = with_recipe("distill")
JSD = Condition("`--distill_loss jsd`", lambda now: now["distill_loss"] == "jsd")

_option = partial(option, needs=(DISTILL,))


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    teacher: str | None = _option(
        None,
        "Teacher with the same tokens: a bundled name, a folder, a .gguf file or a hub id",
        holds=StringKind.PATH,
    )
    teacher_quantization: str = _option(
        "none",
        "Quantize the teacher on load; none: use its weights as they are",
        choices=("none", "8bit", "4bit"),
    )
    teacher_top_k: int = _option(
        0,
        "Compute the teacher's K most likely tokens of the training rows once before the first step, store them in the run, and "
        "free the teacher; 0: compute all in each step",
        high=2**20,
        on_resume=OnResume.OBJECTIVE,
    )
    distill_loss: str = _option(
        "forward_kl",
        "Divergence of the student from the teacher; jsd: the generalized Jensen-Shannon divergence of distill_beta",
        choices=("forward_kl", "reverse_kl", "jsd"),
        on_resume=OnResume.OBJECTIVE,
    )
    distill_beta: float = _option(
        0.5,
        "Place of jsd between the forward (0) and the reverse KL divergence (1)",
        high=1,
        needs=(DISTILL, JSD),
    )
    distill_temperature: float = _option(
        1.0,
        "Temperature of both distributions, and of the student's own answers",
        low=0.01,
        high=100,
        on_resume=OnResume.OBJECTIVE,
    )
    ce_weight: float = _option(
        0.0,
        "Weight of the cross entropy of the data, added to the loss",
        high=1e6,
        on_resume=OnResume.OBJECTIVE,
    )
    on_policy_share: float = _option(
        0.0,
        "Fraction of the steps that train on the student's own answers to the prompts of the data",
        high=1,
        on_resume=OnResume.OBJECTIVE,
    )
