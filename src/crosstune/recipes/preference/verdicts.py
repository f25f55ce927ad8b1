"""Recognize problems of preference training from its metrics: a sentence with advice for each problem."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from crosstune.core.intervals import wilson
from crosstune.core.protocols import Metrics
from crosstune.recipes.preference.data_report import length_advice
from crosstune.recipes.preference.losses import ACCURACY, ANSWER_LENGTH, PreferenceLoss

BROKEN = 0.5
"""Nats per token that the chosen answers may lose before the model counts as broken: 1.65 times the perplexity."""
FALLEN = 0.03
"""Nats per token that the chosen answers may lose without a warning."""
GROWN = 1.5
"""Warn if generated answers are longer by this factor, and by at least `GROWN_TOKENS`."""
GROWN_TOKENS = 8
EARLY_PAIRS = 32
"""Pairs in a row, right after the first step, that are not all ranked correctly by chance."""
EARLY_FRACTION = 0.1
GAP = 0.15
"""Fraction of correctly ranked pairs by which training may exceed the upper end of the held-out interval."""
RECENT_STEPS = 20
MIN_PAIRS = 10
"""With fewer held-out pairs, the accuracy gives no warning."""
FEW_LAYERS = 0.5
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(kw_only=True)
class Verdicts:
    """The problems of a run so far. `observe` returns problem -> sentence; an empty sentence means that it is over."""

    num_steps: int
    num_held_out: int
    mean_tokens: float
    """Mean length of the chosen held-out answers."""
    loss: PreferenceLoss
    reach: str = ""
    """The sentence about an adapter in few layers; empty if it reaches most."""
    _recent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _early_pairs: int | None = 0
    """Correctly ranked pairs since step 2; None after the first wrong one or in a resumed run."""

    def observe_step(self, step: int, metrics: Metrics, *, num_pairs: int) -> dict[str, str]:
        found = {"few layers": self.reach} if self.reach else {}
        if step == 1:  # the model is its reference
            return found
        self._recent.append(metrics)
        if metrics.get(ACCURACY) != 1.0 or (step > 2 and not self._early_pairs):
            self._early_pairs = None
        if self._early_pairs is None or not self.loss.is_paired:
            return found
        self._early_pairs += num_pairs
        is_early = step <= max(3, EARLY_FRACTION * self.num_steps)
        if is_early and self._early_pairs >= EARLY_PAIRS:
            self._early_pairs = None
            found["accuracy too high"] = (
                f"every pair of steps 2 to {step} is ranked correctly: the chosen answers may have a mark that gives them away, "
                "such as a format, a language or a phrase; look at some with `crosstune data FILE --recipe preference`, "
                "and compare answers of the same kind"
            )
        return found

    def observe_evaluation(self, evaluations: Mapping[int, Metrics]) -> dict[str, str]:
        """Compare the last evaluation with the evaluation before training."""
        first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
        if len(evaluations) < 2:
            return {"few layers": self.reach} if self.reach else {}
        lost = {
            side: (first[f"rewards/{side}"] - last[f"rewards/{side}"]) / self.loss.beta / self.mean_tokens
            for side in ("chosen", "rejected")
        }
        return {
            "few layers": self.reach,
            "broken": _broken(lost["chosen"]),
            "both rewards fall": _both_fall(lost, last),
            "accuracy does not grow": self._no_gain(last),
            "answers grow": _answers_grow(first, last, advice=length_advice(self.loss.weights)),
        }

    def _no_gain(self, last: Metrics) -> str:
        accuracies = [one[ACCURACY] for one in self._recent if math.isfinite(one.get(ACCURACY, math.nan))]
        if len(accuracies) < 3 or self.num_held_out < MIN_PAIRS:
            return ""
        trained, held_out = sum(accuracies) / len(accuracies), last[ACCURACY]
        low, high = wilson(held_out, self.num_held_out)
        if trained <= high + GAP:
            return ""
        margins = [one["rewards/margins"] for one in self._recent if "rewards/margins" in one]
        grown = f"the margin grows to {margins[-1]:.2f} in training, but " if margins else ""
        return (
            f"{grown}only {held_out:.0%} of the held-out pairs are ranked correctly ({low:.0%} to {high:.0%}), and "
            f"{trained:.0%} of the training pairs: the model memorizes them; train fewer steps, add pairs, and check that "
            "their labels are right (--label_smoothing or --preference_loss robust for noisy labels)"
        )


def _broken(lost: float) -> str:
    if not lost > BROKEN:
        return ""
    return (
        f"the cross entropy of the held-out chosen answers rose by {lost:.2f} per token: the model is breaking; lower --lr "
        "(a tenth), train fewer steps, or add the term that keeps them likely with --sft_weight 1"
    )


def _both_fall(lost: Mapping[str, float], last: Metrics) -> str:
    if not FALLEN < lost["chosen"] <= BROKEN or lost["rejected"] <= 0:
        return ""
    return (
        f"both rewards fall (chosen {last['rewards/chosen']:.2f}, rejected {last['rewards/rejected']:.2f}): the model moves "
        "away from both answers, toward answers that are in no pair; add --sft_weight 1, lower --lr, or use "
        "--preference_loss apo_zero, which raises the chosen answers"
    )


def _answers_grow(first: Metrics, last: Metrics, *, advice: str) -> str:
    before, after = (one.get(ANSWER_LENGTH, math.nan) for one in (first, last))
    if not after > max(GROWN * before, before + GROWN_TOKENS):
        return ""
    return (
        f"answers grow: {before:.0f} tokens on average before training and {after:.0f} now; if length is not the aim, "
        f"{advice}"
    )


def reach_of(names: Iterable[str], *, num_layers: int | None) -> str:
    """Return a sentence if the trained weights are in few layers of the model."""
    found = {match.group(1) for name in names if (match := _LAYER.search(name))}
    if not found or num_layers is None or len(found) > FEW_LAYERS * num_layers:
        return ""
    return (
        f"the adapter is in {len(found)} of {num_layers} layers, which may be too few to change answers; set "
        "--lora_target_modules to modules of all layers"
    )
