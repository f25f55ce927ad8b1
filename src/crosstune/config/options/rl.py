"""Options of the rl recipe: the loss, the answers of a step, the corrections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import RL, Condition
from crosstune.config.option import OnResume, option

CLIPPED_LOSS = Condition("another loss than reinforce", lambda now: now["rl_loss"] != "reinforce")
CORRECTED = Condition("a correction", lambda now: now["importance_correction"] != "none")

RL_LOSSES = ("grpo", "dr_grpo", "dapo", "bnpo", "gspo", "rloo", "reinforce")
"""Values of --rl_loss."""
_option = partial(option, needs=(RL,))


@dataclass(frozen=True, kw_only=True)
class RlOptions:
    rl_loss: str = _option(
        "dapo",
        "Loss: grpo and dr_grpo (a mean over answers), dapo (over the tokens of the step), bnpo (over the tokens of a "
        "micro-batch), gspo (ratios of whole answers), rloo (leave-one-out baseline), or reinforce (no ratio, no clipping)",
        choices=RL_LOSSES,
    )
    num_generations: int = _option(
        8,
        "Answers to each prompt, compared with each other",
        low=1,
        high=4096,
        aliases=("num_return_sequences",),
        on_resume=OnResume.ORDER,
    )
    temperature: float = _option(
        1.0, "Temperature of the answers, in the generator and in the loss", low=0.01, high=100
    )
    epsilon: float | None = _option(
        None,
        "Largest change of a token's probability ratio that still has a gradient; unset: 0.2, and 3e-4 for gspo",
        high=1e6,
        needs=(RL, CLIPPED_LOSS),
    )
    epsilon_high: float | None = _option(
        None,
        "Upper bound, if it differs from epsilon (0.28 in DAPO); unset: epsilon, and 4e-4 for gspo",
        high=1e6,
        needs=(RL, CLIPPED_LOSS),
    )
    num_iterations: int = _option(
        1,
        "Optimizer steps on the same answers",
        low=1,
        high=1000,
        needs=(RL, CLIPPED_LOSS),
        on_resume=OnResume.ORDER,
    )
    scale_rewards: str = _option(
        "auto",
        "Divide advantages by the standard deviation of the rewards of a group or of the whole step, or not; auto: group, but "
        "none for dr_grpo, rloo and reinforce",
        choices=("auto", "group", "batch", "none"),
    )
    mask_truncated: bool = _option(
        False,
        "Leave answers that end at max_new_tokens out of the loss",
        aliases=("mask_truncated_completions",),
    )
    importance_correction: str = _option(
        "token",
        "Weight the loss by the probability in the training pass relative to the generator's: of each token, of whole answers, or "
        "not",
        choices=("token", "sequence", "none"),
    )
    importance_cap: float = _option(
        3.0,
        "Largest weight of that correction",
        low=1,
        high=1e6,
        aliases=("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"),
        needs=(RL, CORRECTED),
    )
    dynamic_sampling: int = _option(
        0,
        "Replace groups whose answers all have the same reward by answers to other prompts, up to N times per step; 0: keep them",
        high=100,
    )
    sampler_bound: float = _option(
        0.02,
        "Warn if the log probabilities of generator and training pass differ by more, on average over the tokens of a step",
        high=100,
        on_resume=OnResume.FREE,
    )
