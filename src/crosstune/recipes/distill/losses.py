"""Distillation losses for arrays of torch and MLX, with the `array_functions` of their engine: divergences between the distributions of a teacher and a student.

Formulas: the generalized Jensen-Shannon divergence and its limits, the forward and the reverse KL divergence, of arXiv:2306.13649.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from crosstune.config.schema import Config

BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0}
"""The limits of the generalized divergence."""
METRICS = ("kl", "cross_entropy", "agreement", "teacher_cross_entropy")
"""Means over tokens: the forward KL divergence, the cross entropy of the student and of the teacher on the data, and how
often both predict the same token."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    beta: float = 0.0
    """0: forward KL, 1: reverse KL, as in the generalized divergence."""
    temperature: float = 1.0
    top_k: int = 0
    """Number of the teacher's most likely tokens that are compared one by one; 0: all tokens."""
    width: int
    """Number of tokens of the vocabulary; outputs beyond belong to no token."""

    @classmethod
    def from_config(cls, config: Config, *, width: int) -> Objective:
        beta, top_k = BETAS.get(config.distill_loss, config.distill_beta), config.teacher_top_k
        return cls(beta=beta, temperature=config.distill_temperature, top_k=top_k, width=width)

    @property
    def num_ids(self) -> int:
        """The number of tokens that are compared one by one."""
        return min(self.top_k, self.width)

    @property
    def num_columns(self) -> int:
        """The number of stored values for each token: see `pack_rows`."""
        return self.num_ids + min(self.top_k + 1, self.width) + 1


@dataclass(frozen=True, kw_only=True)
class TeacherRows:
    """The teacher's distributions for some tokens, a row each."""

    log_probs: Any
    """Of the outcomes, at the temperature."""
    target: Any
    """The log probability of the data's token, without temperature."""
    best: Any
    """The most likely token."""
    ids: Any = None
    """The tokens of the first outcomes; None if every token is an outcome."""


def read_teacher(logits: Any, targets: Any, objective: Objective, f: ModuleType) -> TeacherRows:
    """Return the distributions of the teacher's fp32 logits over the tokens of the vocabulary."""
    plain = f.log_softmax(logits)
    scaled = _scaled(logits, plain, objective, f)
    ids = f.top_ids(scaled, objective.num_ids) if objective.top_k else None
    return TeacherRows(
        log_probs=_outcomes(scaled, ids, f),
        target=f.gather(plain, targets[:, None])[:, 0],
        best=f.argmax(scaled) if ids is None else ids[:, 0],
        ids=ids,
    )


def pack_rows(rows: TeacherRows, f: ModuleType) -> Any:
    """Return an fp32 row for each token: the ids, the log probabilities of the outcomes, and the log probability of the
    data's token."""
    return f.concat([rows.ids * 1.0, rows.log_probs, rows.target[:, None]])


def unpack_rows(packed: Any, objective: Objective, f: ModuleType) -> TeacherRows:
    count = objective.num_ids
    ids = f.as_ids(packed[:, :count])
    return TeacherRows(log_probs=packed[:, count:-1], target=packed[:, -1], best=ids[:, 0], ids=ids)


def measure(
    logits: Any, targets: Any, teacher: TeacherRows, objective: Objective, f: ModuleType, *, weight: Any
) -> tuple[Any, Any]:
    """Return the loss and the metrics of each token from the student's fp32 logits. The loss is the divergence from the
    teacher plus `weight` times the cross entropy. The metrics come in the order of METRICS, followed by 1 if the student's
    most likely token is wrong."""
    plain = f.log_softmax(logits)
    scaled = _scaled(logits, plain, objective, f)
    student = _outcomes(scaled, teacher.ids, f)
    losses = divergence(student, teacher.log_probs, beta=objective.beta, f=f)
    kl = losses if objective.beta == 0 else divergence(student, teacher.log_probs, beta=0.0, f=f)
    cross_entropy = -f.gather(plain, targets[:, None])[:, 0]
    best = f.argmax(logits)
    agrees, is_wrong = (best == teacher.best) * 1.0, (best != targets) * 1.0
    return losses + weight * cross_entropy, f.stack([kl, cross_entropy, agrees, -teacher.target, is_wrong])


def divergence(student: Any, teacher: Any, *, beta: float, f: ModuleType) -> Any:
    """Return the generalized Jensen-Shannon divergence of rows of log probabilities."""
    if beta == 0:
        return _kl(teacher, student, f)
    if beta == 1:
        return _kl(student, teacher, f)
    mixture = f.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture, f) + (1 - beta) * _kl(student, mixture, f)


def metric_sums(values: Any, counted: Any) -> Mapping[str, tuple[Any, Any]]:
    """Return the sums of the metrics over the counted tokens."""
    total = counted.sum()
    return {name: ((values[:, column] * counted).sum(), total) for column, name in enumerate(METRICS)}


def _kl(p: Any, q: Any, f: ModuleType) -> Any:
    return (f.exp(p) * (p - q)).sum(-1)


def _scaled(logits: Any, plain: Any, objective: Objective, f: ModuleType) -> Any:
    if objective.temperature == 1 and logits.shape[-1] == objective.width:
        return plain
    return f.log_softmax(logits[..., : objective.width] / objective.temperature)


def _outcomes(log_probs: Any, ids: Any, f: ModuleType) -> Any:
    """Return the log probabilities of the tokens `ids`, and of all others as one outcome."""
    if ids is None:
        return log_probs
    kept = f.gather(log_probs, ids)
    if ids.shape[-1] == log_probs.shape[-1]:
        return kept
    return f.concat([kept, f.logsumexp(f.without(log_probs, ids))[:, None]])
