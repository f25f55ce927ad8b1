"""Recognize problems of reinforcement learning from its metrics: a sentence with advice for each problem."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from crosstune.core.intervals import Z95
from crosstune.core.protocols import Metrics

RECENT_STEPS = 8
"""Number of steps that are averaged, at the start of a run and at its current end."""
COLLAPSED = 0.1
"""Fraction of its start value below which the entropy counts as collapsed, if it is also below `LOW_ENTROPY`."""
LOW_ENTROPY = 0.1
EQUAL = 0.9
"""Fraction of groups without spread above which a run hardly learns."""
CUT, FAILING = 0.5, 0.5
WATCHED = "watch/"
"""Prefix of the names of rewards with weight 0, which are only watched."""


class _Values(NamedTuple):
    mean: float
    error: float
    """The standard error of the mean."""


@dataclass(kw_only=True)
class Verdicts:
    """The problems of a run so far. `observe_step` returns problem -> sentence; an empty sentence means that it is over."""

    names: Sequence[str]
    """The rewards."""
    sampler_bound: float
    max_new_tokens: int
    masks_cut: bool = False
    """True if cut answers are not in the loss."""
    _num_steps: int = 0
    _first: list[Metrics] = field(default_factory=list)
    _recent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def observe_step(self, metrics: Metrics) -> dict[str, str]:
        if len(self._first) < RECENT_STEPS:
            self._first.append(metrics)
        self._recent.append(metrics)
        self._num_steps += 1
        found = {"sampler difference": self._sampler_difference(metrics)}
        if len(self._recent) < RECENT_STEPS // 2:
            return found
        found |= {
            "all groups equal": self._equal(),
            "answers cut": self._cut(),
            **{f"reward {name} fails": self._failing(name) for name in self.names},
        }
        if self._num_steps >= 2 * RECENT_STEPS:
            found |= {"entropy collapse": self._collapse(), "reward hacking": self._hacking(self._trained)}
        return found

    def observe_evaluation(self, evaluations: Mapping[int, Metrics], *, num: int) -> dict[str, str]:
        """Compare the last evaluation with the evaluation before training, of `num` prompts."""
        if len(evaluations) < 2 or num < 2:
            return {}
        first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]

        def value(one: Metrics, name: str) -> _Values:
            missing, deviation = "completions/unscored_ratio", "reward_std"
            if name:
                missing, deviation = f"rewards/{name}/failed", f"rewards/{name}/std"
            count = round(num * (1 - one.get(missing, 0.0)))
            error = one.get(deviation, math.nan) / math.sqrt(count) if count > 1 else math.nan
            return _Values(one.get(mean_name(name), math.nan), error)

        def values(name: str) -> tuple[_Values, _Values]:
            return value(first, name), value(last, name)

        sentence = self._hacking(values)
        return {"reward hacking (held out)": f"on held-out prompts, {sentence}" if sentence else ""}

    def _trained(self, name: str) -> tuple[_Values, _Values]:
        """Return a reward in the first and in the last steps."""
        pair = []
        for steps in (self._first, self._recent):
            known = [value for one in steps if math.isfinite(value := one.get(mean_name(name), math.nan))]
            error = float(np.std(known, ddof=1)) / math.sqrt(len(known)) if len(known) > 1 else math.nan
            pair.append(_Values(float(np.mean(known)) if known else math.nan, error))
        return pair[0], pair[1]

    def _hacking(self, values: Callable[[str], tuple[_Values, _Values]]) -> str:
        """Return a sentence if the reward rises and a watched one does not."""
        first, last = values("")
        if not _rises(first, last):
            return ""
        for name in self.names:
            before, after = values(name)
            if not name.startswith(WATCHED) or not math.isfinite(after.mean) or _rises(before, after):
                continue
            return (
                f"the reward rises from {first.mean:.3g} to {last.mean:.3g}, but {name.removeprefix(WATCHED)} scores the answers "
                f"{before.mean:.3g} before and {after.mean:.3g} now: the model may exploit a flaw of the reward; read the "
                "samples, fix the reward, or add --beta 0.04"
            )
        return ""

    def _sampler_difference(self, metrics: Metrics) -> str:
        found = metrics.get("sampling/sampling_logp_difference/mean", 0.0)
        if not found > self.sampler_bound:
            return ""
        return (
            f"the log probabilities of the generator and of the training pass differ by {found:.2g} per token (bound "
            f"{self.sampler_bound:g}): the gradients belong to other answers; use --precision bf16 or fp32 without "
            "--lora_dropout, --kernels general, or an unquantized base"
        )

    def _mean_of(self, name: str, steps: Sequence[Metrics] | deque[Metrics]) -> float:
        known = [one[name] for one in steps if math.isfinite(one.get(name, math.nan))]
        return float(np.mean(known)) if known else math.nan

    def _equal(self) -> str:
        share = self._mean_of("frac_reward_zero_std", self._recent)
        if not share >= EQUAL:
            return ""
        reward = self._mean_of("reward", self._recent)
        return (
            f"in {share:.0%} of the groups all answers have the same reward (mean {reward:.3g}), so almost nothing is learned: "
            "use prompts that the model solves sometimes, a graded reward, more --num_generations, or "
            "--dynamic_sampling 3"
        )

    def _cut(self) -> str:
        share = self._mean_of("completions/clipped_ratio", self._recent)
        if not share > CUT:
            return ""
        effect, do = (
            " before they end",
            "ask for short answers in the prompts, or leave cut answers out with --mask_truncated",
        )
        if self.masks_cut:
            effect = ", and --mask_truncated leaves them out of the loss, so little is learned"
            do = "or ask for short answers in the prompts"
        start = f"{share:.0%} of the answers are cut at {self.max_new_tokens} tokens{effect}"
        return f"{start}: raise --max_new_tokens, {do}"

    def _failing(self, name: str) -> str:
        recent = list(self._recent)[-RECENT_STEPS // 2 :]
        missing = [one.get(f"rewards/{name}/failed", 0.0) for one in recent]
        if not np.mean(missing) > FAILING:
            return ""
        return (
            f"the reward {name} has no score for {np.mean(missing):.0%} of the answers: see the warnings about its errors, and "
            "the columns that it reads"
        )

    def _collapse(self) -> str:
        before, now = (self._mean_of("entropy", steps) for steps in (self._first, self._recent))
        if not (now < LOW_ENTROPY and now < COLLAPSED * before):
            return ""
        return (
            f"the entropy fell from {before:.2g} to {now:.2g} per token: all answers become the same, and nothing is left to "
            "compare; lower --lr, raise --epsilon_high to 0.28 or --temperature, or add --beta 0.04"
        )


def _rises(first: _Values, last: _Values) -> bool:
    """Return True if the difference of the means is beyond chance."""
    return last.mean - first.mean > Z95 * math.hypot(first.error, last.error)


def mean_name(name: str) -> str:
    """Return the metric of a reward's mean; of their weighted sum for an empty name."""
    return f"rewards/{name}/mean" if name else "reward"
