"""Recognize problems of distillation from its evaluations: a sentence with advice for each problem."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.core.protocols import Metrics

CLOSER = 0.95
"""The fraction of the first divergence below which the student has come closer."""
CLOSE = 0.02
"""A student within this divergence, in nats per token, is close."""
NO_BETTER = 1.0
"""The teacher's cross entropy relative to the student's, from which the teacher is no better."""


def find_problems(evaluations: Mapping[int, Metrics], teacher: str, *, ce_weight: float) -> dict[str, str]:
    """Compare the last evaluation with the one before training; return problem -> sentence, empty if it is over."""
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    found = {"teacher is no better": _no_better(first, teacher)}
    if len(evaluations) > 1:
        found["student stays away"] = _stays_away(first["kl"], last["kl"], ce_weight)
    return found


def _no_better(first: Metrics, name: str) -> str:
    teacher, student = first["teacher_cross_entropy"], first["cross_entropy"]
    if not teacher >= NO_BETTER * student:
        return ""
    return (
        f"on the held-out answers the teacher {name} is no better than the student before training (cross entropy "
        f"{teacher:.3f} and {student:.3f} per token): check that it knows the chat template and the language of the data, "
        "or use a better one"
    )


def _stays_away(before: float, after: float, ce_weight: float) -> str:
    if not after > max(CLOSER * before, CLOSE):
        return ""
    less = ", or lower --ce_weight" if ce_weight else ""
    return (
        f"the student stays away from the teacher: the held-out divergence is {before:.3f} before training and {after:.3f} "
        f"now; raise --lr or --lora_rank, train more steps{less}"
    )
