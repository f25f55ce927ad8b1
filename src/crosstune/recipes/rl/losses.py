"""Losses of reinforcement learning as functions of log probabilities, for arrays of torch and MLX.

Formulas: GRPO arXiv:2402.03300, Dr. GRPO 2503.20783, DAPO 2503.14476, BNPO 2506.02864, GSPO 2507.18071, RLOO 2402.14740. The
weights of the generator's mismatch are truncated importance ratios (2512.01374).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config

Floats = NDArray[np.float64]
GROUP_SCALE_FLOOR = 1e-4
"""Added to a standard deviation that advantages are divided by, as in TRL."""
BY_TOKENS = ("dapo", "reinforce")
"""Losses that are a mean over the tokens of a step."""
WHOLE_ANSWERS = ("gspo", "rloo")
"""Losses with one probability ratio per answer."""
UNSCALED = ("dr_grpo", "rloo", "reinforce")
"""Losses whose advantages are not divided by a standard deviation by default."""
_BETAS, _EPSILONS = {"rloo": 0.05}, {"gspo": (3e-4, 4e-4)}


@dataclass(frozen=True, kw_only=True)
class RlLoss:
    """A loss and its settings."""

    name: str = "dapo"
    beta: float = 0.0
    """Weight of the KL divergence from the reference: in the loss, or for rloo in the rewards."""
    low: float = 0.2
    high: float = 0.2
    correction: str = "token"
    cap: float = math.inf
    scale: str = "group"
    longest: int = 512
    """Maximum number of tokens of an answer, the divisor of dr_grpo."""
    temperature: float = 1.0

    @classmethod
    def from_config(cls, config: Config) -> RlLoss:
        name = config.rl_loss
        low, high = _EPSILONS.get(name, (0.2, None))
        low = config.epsilon if config.epsilon is not None else low
        if config.epsilon_high is not None or config.epsilon is not None or high is None:
            high = config.epsilon_high if config.epsilon_high is not None else low
        scale = config.scale_rewards
        return cls(
            name=name,
            beta=config.beta if config.beta is not None else _BETAS.get(name, 0.0),
            low=low,
            high=high,
            correction=config.importance_correction,
            cap=config.importance_cap,
            scale=("none" if name in UNSCALED else "group") if scale == "auto" else scale,
            longest=config.max_new_tokens,
            temperature=config.temperature,
        )

    @property
    def has_kl_term(self) -> bool:
        return self.beta != 0 and self.name != "rloo"

    @property
    def has_kl_reward(self) -> bool:
        return self.beta != 0 and self.name == "rloo"

    @property
    def unit(self) -> str:
        """The unit of the weight of a micro-batch."""
        if self.name in BY_TOKENS:
            return "answer_tokens"
        return "micro_batches" if self.name == "bnpo" else "answers"

    def weight(self, num_answers: int, num_tokens: int) -> int:
        """Return the number of terms of a micro-batch, with this number of tokens in the loss."""
        return {"answer_tokens": num_tokens, "micro_batches": 1, "answers": num_answers}[self.unit]


def advantages(rewards: Floats, *, name: str, scale: str) -> Floats:
    """Return the advantages from rewards, a row for each prompt. An answer without a reward (nan) has the advantage 0."""
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    total = np.nansum(rewards, axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        baseline = (total - rewards) / (count - 1) if name == "rloo" else total / count
        found = rewards - baseline
        if scale == "group":
            found = found / (deviation(rewards)[:, None] + GROUP_SCALE_FLOOR)
        elif scale == "batch":
            found = found / (deviation(rewards.reshape(1, -1)) + GROUP_SCALE_FLOOR)
    return np.nan_to_num(found, nan=0.0, posinf=0.0, neginf=0.0)


def deviation(rewards: Floats) -> Floats:
    """Return the sample standard deviation of each row without its nan; 0 for fewer than two numbers."""
    count = (~np.isnan(rewards)).sum(axis=1)
    mean = np.nansum(rewards, axis=1) / np.maximum(count, 1)
    squares = np.nansum((rewards - mean[:, None]) ** 2, axis=1)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def metric_names(loss: RlLoss) -> tuple[str, ...]:
    """Return the names of the metrics of a training pass, the same as TRL's."""
    clips = [f"clip_ratio/{kind}_mean" for kind in ("low", "high", "region")]
    return (
        "entropy",
        *(clips if loss.name != "reinforce" else ()),
        "sampling/sampling_logp_difference/mean",
        "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/mean",
        *(("kl",) if loss.has_kl_term else ()),
    )


Sums = dict[str, tuple[Any, Any]]


def loss_and_metrics(
    loss: RlLoss,
    f: ModuleType,
    arrays: Mapping[str, Any],
    *,
    log_probs: Any,
    entropies: Any,
    answers: Any,
    counted: Any,
) -> tuple[Any, Sums]:
    """Return the summed loss of a micro-batch and the sums of its metrics. `f`: the `array_functions` of an engine.

    The values of tokens are vectors over all answers: `log_probs` in the training pass, `answers` with the number of the answer,
    `counted` with 0 for padding. The arrays: for tokens, `sampler`, and where they exist `old` and `reference`; for answers,
    `advantages` and `kept`, which is 0 for an answer left out of the loss.
    """
    kept = arrays["kept"][answers] * counted
    advantage, lengths = arrays["advantages"], f.sum_by(kept, answers, arrays["kept"])
    num_tokens, num_answers = kept.sum(), arrays["kept"].sum()
    old = arrays["old"] if "old" in arrays else f.detach(log_probs)
    whole = loss.name in WHOLE_ANSWERS
    divisor = f.clip(lengths, 1.0, math.inf)
    log_ratio = (log_probs - old) * kept
    if whole:
        log_ratio = f.sum_by(log_ratio, answers, lengths)
        log_ratio = log_ratio / divisor if loss.name == "gspo" else log_ratio
    else:
        advantage = advantage[answers]
    ratio = f.exp(log_ratio)
    mismatch = (old - arrays["sampler"]) * kept
    weight = _correction(loss, f, mismatch, answers, lengths, whole=loss.name == "rloo")

    if loss.name == "reinforce":
        terms = -advantage * log_probs
    else:
        clipped = f.clip(ratio, 1 - loss.low, 1 + loss.high)
        terms = -f.minimum(ratio * advantage, clipped * advantage)
    if loss.name == "gspo":
        terms = terms[answers]
    terms = terms * weight
    sums: Sums = {"entropy": (f.detach(entropies * kept).sum(), num_tokens)}
    if loss.name != "reinforce":
        mask, number = (arrays["kept"], num_answers) if whole else (kept, num_tokens)
        low = (ratio < 1 - loss.low) * (advantage < 0) * mask
        high = (ratio > 1 + loss.high) * (advantage > 0) * mask
        for kind, hits in (("low", low.sum()), ("high", high.sum()), ("region", low.sum() + high.sum())):
            sums[f"clip_ratio/{kind}_mean"] = (hits, number)
    if loss.has_kl_term:
        distance = (arrays["reference"] - log_probs) * kept
        kl = (f.exp(distance) - distance - 1) * (ratio[answers] if whole else ratio)
        sums["kl"] = (f.detach(kl * kept).sum(), num_tokens)
        terms = terms + loss.beta * kl
    difference = f.absolute(f.detach(mismatch))
    sums["sampling/sampling_logp_difference/mean"] = (difference.sum(), num_tokens)
    sums["sampling/sampling_logp_difference/max"] = (difference.max(), num_tokens)
    scale = f.detach(f.exp(mismatch)) * kept
    sums["sampling/importance_sampling_ratio/mean"] = (scale.sum(), num_tokens)
    if loss.name == "rloo":
        return terms.sum(), sums  # without a gradient for answers that are left out
    terms = terms * kept
    if loss.name in BY_TOKENS:
        return terms.sum(), sums
    if loss.name == "bnpo":
        return terms.sum() / f.clip(num_tokens, 1.0, math.inf), sums
    by_answer = f.sum_by(terms, answers, lengths)
    return (by_answer / (loss.longest if loss.name == "dr_grpo" else divisor)).sum(), sums


def _correction(
    loss: RlLoss, f: ModuleType, mismatch: Any, answers: Any, lengths: Any, *, whole: bool
) -> Any:
    """Return the capped importance ratios of the training pass to the generator, without a gradient: for each answer if the terms
    of the loss are `whole` answers, otherwise for each token."""
    if loss.correction == "none":
        return 1.0
    if loss.correction == "token" and not whole:
        return f.clip(f.exp(f.detach(mismatch)), 0.0, loss.cap)
    by_answer = f.clip(f.exp(f.detach(f.sum_by(mismatch, answers, lengths))), 0.0, loss.cap)
    return by_answer if whole else by_answer[answers]
