"""Recognize problems of distillation from its evaluations: a sentence with advice for each problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from crosstune.core.protocols import Metrics

CLOSER = 0.95
"""The fraction of the first divergence below which the student has come closer."""
CLOSE = 0.02
"""A student within this divergence, in nats per token, is close."""
NO_BETTER = 1.0
"""The teacher's cross entropy relative to the student's, from which the teacher is no better."""


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """The problems of a run. `observe_evaluation` returns problem -> sentence; an empty sentence means that it is over."""

    teacher: str
    ce_weight: float

    def observe_evaluation(self, evaluations: Mapping[int, Metrics]) -> dict[str, str]:
        """Compare the last evaluation with the evaluation before training."""
        first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
        found = {"teacher is no better": self._no_better(first)}
        if len(evaluations) > 1:
            found["student stays away"] = self._stays_away(first, last)
        return found

    def _no_better(self, first: Metrics) -> str:
        teacher, student = first["teacher_cross_entropy"], first["cross_entropy"]
        if not teacher >= NO_BETTER * student:
            return ""
        return (
            f"on the held-out answers the teacher {self.teacher} is no better than the student before training (cross entropy "
            f"{teacher:.3f} and {student:.3f} per token): check that it knows the chat template and the language of the data, "
            "or use a better one"
        )

    def _stays_away(self, first: Metrics, last: Metrics) -> str:
        before, after = first["kl"], last["kl"]
        if not after > max(CLOSER * before, CLOSE):
            return ""
        less = ", or lower --ce_weight" if self.ce_weight else ""
        return (
            f"the student stays away from the teacher: the held-out divergence is {before:.3f} before training and {after:.3f} "
            f"now; raise --lr or --lora_rank, train more steps{less}"
        )
