"""Track the progress of a run, and assess its evaluations: best step, early stopping, overfitting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from crosstune.checkpoint.rotate import lowest
from crosstune.core.protocols import Backward, Memory

_COUNTED = ("steps", "tokens", "skipped", "seconds", "peak_memory_bytes", "wall_s")
_CARRIED = (*_COUNTED, "first_loss", "final_loss")
"""Fields stored in a checkpoint."""


@dataclass
class Progress:
    status: str = "failed"
    steps: int = 0
    start_step: int = 0
    """Steps done before this process started."""
    tokens: int = 0
    weight: int = 0
    """Total weight of all losses so far."""
    weight_name: str = "supervised_tokens"
    """The recipe's name for the weight."""
    skipped: int = 0
    """Steps skipped because their loss or gradient was not finite."""
    first_loss: float | None = None
    final_loss: float | None = None
    peak_memory_bytes: int = 0
    stopped_early: bool = False
    """True if the evaluations no longer improved, see --early_stopping."""
    seconds: float = 0.0
    """Time spent in steps, across all starts of the run."""
    wall_s: float = 0.0
    """Wall time across all starts of the run, up to the last checkpoint or the end."""
    warm_s: float = 0.0
    warm_tokens: int = 0
    longest_step_s: float = 0.0
    eval_before: Mapping[str, float] = field(default_factory=dict)
    eval_after: Mapping[str, float] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step -> loss on held-out data."""
    eval_metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    """Step -> all metrics on held-out data."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of the last evaluation."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Problem -> advice, for recipes that give verdicts."""

    recoveries: list[dict[str, Any]] = field(default_factory=list)
    """The changes that this process made after running out of memory."""

    def add_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.eval_metrics[step] = dict(metrics)
        if "loss" in metrics:
            self.evaluations[step] = metrics["loss"]

    def add(self, result: Backward | None, *, step_s: float, memory: Memory) -> None:
        """Count a step; `result` is None if it was skipped."""
        self.steps += 1
        self.seconds += step_s
        self.longest_step_s = max(self.longest_step_s, step_s)
        self.peak_memory_bytes = max(self.peak_memory_bytes, memory.peak_bytes)
        if result is None:
            self.skipped += 1
            return
        self.tokens += result.num_tokens
        self.weight += result.weight
        self.first_loss = result.loss if self.first_loss is None else self.first_loss
        self.final_loss = result.loss
        if self.steps - self.start_step != 2:
            self.warm_s, self.warm_tokens = self.warm_s + step_s, self.warm_tokens + result.num_tokens
        else:
            self.warm_s, self.warm_tokens = step_s, result.num_tokens

    def tokens_per_s(self) -> float | None:
        """Return the rate over the steps of this process, without the first (warm-up) unless it is the only one."""
        return self.warm_tokens / self.warm_s if self.warm_s else None

    def summary(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "steps": self.steps,
            "tokens": self.tokens,
            self.weight_name: self.weight,
            "skipped_steps": self.skipped,
            "stopped_early": self.stopped_early,
            "first_loss": self.first_loss,
            "final_loss": self.final_loss,
            "eval_loss": self.eval_after.get("loss"),
            "eval_before": dict(self.eval_before),
            "eval_after": dict(self.eval_after),
            "evaluations": {str(step): loss for step, loss in sorted(self.evaluations.items())},
            "tokens_per_s": self.tokens_per_s(),
            "peak_memory_bytes": self.peak_memory_bytes,
            "recoveries": list(self.recoveries),
            **({"eval_intervals": dict(self.intervals)} if self.intervals else {}),
            **({"verdicts": dict(self.verdicts)} if self.verdicts else {}),
        }

    def to_manifest(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _CARRIED} | {
            self.weight_name: self.weight,
            "eval_before": dict(self.eval_before),
            "evaluations": {str(step): loss for step, loss in self.evaluations.items()},
            "eval_metrics": {str(step): dict(found) for step, found in self.eval_metrics.items()},
            **({"verdicts": dict(self.verdicts)} if self.verdicts else {}),
        }

    @classmethod
    def from_manifest(cls, carried: Mapping[str, Any], *, weight_name: str = "supervised_tokens") -> Progress:
        known = {name: carried[name] for name in _CARRIED if name in carried}
        known |= {"weight": int(carried.get(weight_name) or 0), "weight_name": weight_name}
        progress = cls(**known, eval_before=dict(carried.get("eval_before") or {}))
        progress.start_step = progress.steps
        progress.verdicts = dict(carried.get("verdicts") or {})
        losses, metrics = carried.get("evaluations") or {}, carried.get("eval_metrics") or {}
        progress.evaluations = {int(step): loss for step, loss in _numbers(losses).items()}
        progress.eval_metrics = {int(step): _numbers(found) for step, found in metrics.items()}
        return progress


def _numbers(carried: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers from JSON, where null is a non-finite number."""
    return {key: math.nan if value is None else float(value) for key, value in carried.items()}


WORSE = 1.02
"""An evaluation loss above this multiple of the best counts as worse, not as noise."""

Losses = Mapping[int, float]
"""Step -> evaluation loss."""


def trained_losses(evaluations: Losses) -> dict[int, float]:
    """Return the finite evaluation losses after at least one step, in step order."""
    return {
        step: evaluations[step] for step in sorted(evaluations) if step and math.isfinite(evaluations[step])
    }


def best_step(evaluations: Losses) -> int | None:
    """Return the step with the lowest evaluation loss, the earliest on a tie; None if no loss after step 0 is finite."""
    return lowest([step for step in evaluations if step], evaluations)


def stops_early(evaluations: Losses, *, patience: int) -> bool:
    """Return True if the last `patience` evaluations brought no improvement; never if `patience` is 0."""
    best = best_step(evaluations) or 0  # without a finite loss there is no improvement
    return patience > 0 and sum(step > best for step in evaluations) >= patience


def early_stopping_message(evaluations: Losses, *, patience: int) -> str:
    last = [evaluations[step] for step in sorted(evaluations)[-patience:]]
    if not any(math.isfinite(loss) for loss in last):
        return f"stopped early: the loss of {patience} evaluations in a row is not finite"
    return f"stopped early: no lower evaluation loss in {patience} evaluations"


def evaluation_warning(evaluations: Losses) -> tuple[str, str]:
    """Describe the problem of the last evaluation in a word and a sentence; both are empty without a problem."""
    last = max(evaluations, default=0)
    if not math.isfinite(evaluations.get(last, 0.0)):
        return "not finite", (
            f"the evaluation loss at step {last} is {evaluations[last]}, so these weights count as no improvement; "
            "check the held-out data, or try --precision fp32 or a lower --lr"
        )
    best = best_step(evaluations)
    if best is not None and overfits(evaluations):
        return "overfitting", (
            f"overfitting: the evaluation loss was {evaluations[best]:.4f} at step {best} and is "
            f"{evaluations[last]:.4f} at step {last}; train fewer steps (--early_stopping stops by itself), lower --lr, "
            "or add data"
        )
    return "", ""


def overfits(evaluations: Losses) -> bool:
    """Return True if the last evaluation loss is clearly above the best."""
    losses, best = trained_losses(evaluations), best_step(evaluations)
    if best is None:
        return False
    last = losses[max(losses)]
    return last > WORSE * losses[best] if losses[best] > 0 else last > losses[best]
