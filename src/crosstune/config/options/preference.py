"""Options of the preference recipe: the loss, its strength, the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import (
    KTO,
    LOSSES,
    WITHOUT_REFERENCE,
    Condition,
    check_losses,
    parse_losses,
    with_recipe,
)
from crosstune.config.option import OnResume, option


def _with_losses(*names: str) -> Condition:
    return Condition(
        f"`--preference_loss` {', '.join(names)}",
        lambda now: any(name in names for name in parse_losses(now["preference_loss"])),
    )


PREFERENCE = with_recipe("preference")
WITH_REFERENCE = _with_losses(*(name for name in LOSSES if name not in WITHOUT_REFERENCE))
SMOOTHED_LOSS, SIMPO, KTO_LOSS = (
    _with_losses(*names) for names in (("dpo", "robust", "simpo", "cpo"), ("simpo",), (KTO,))
)
PREFERENCE_OR_RL = with_recipe("preference", "rl")
PAIRED_LOSS = Condition(
    f"a `--preference_loss` other than {KTO}", lambda now: KTO not in parse_losses(now["preference_loss"])
)

_option = partial(option, needs=(PREFERENCE,))


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    preference_loss: str = _option(
        "dpo",
        "Loss, or losses with weights as in dpo:0.8,bco:0.2,sft:1: dpo, ipo, hinge, robust, apo_zero, apo_down, nca, bco, sppo, "
        "orpo, simpo, cpo, sft; kto for single answers with a label",
        check=check_losses,
        joins_items=":",
        on_resume=OnResume.OBJECTIVE,
    )
    beta: float | None = option(
        None,
        "Strength of the preference, in most losses the distance to the reference; unset: 0.1, and 2 for simpo alone. In rl, the "
        "weight of the KL divergence from the reference; unset: 0, and 0.05 for rloo",
        high=1e6,
        needs=(PREFERENCE_OR_RL,),
    )
    label_smoothing: float = _option(
        0.0, "Assumed fraction of wrong labels", high=0.49, needs=(PREFERENCE, SMOOTHED_LOSS)
    )
    simpo_gamma: float = _option(0.5, "Target margin of simpo", high=1e6, needs=(PREFERENCE, SIMPO))
    desirable_weight: float = _option(
        1.0, "Weight of desirable answers in kto", low=1e-6, high=1e6, needs=(PREFERENCE, KTO_LOSS)
    )
    undesirable_weight: float = _option(
        1.0, "Weight of undesirable answers in kto", low=1e-6, high=1e6, needs=(PREFERENCE, KTO_LOSS)
    )
    sft_weight: float | None = _option(
        None,
        "Weight of the cross entropy of the chosen answers, added to the loss; unset: the weight of orpo and cpo, otherwise 0",
        high=1e6,
        needs=(PREFERENCE, PAIRED_LOSS),
    )
    reference: str = _option(
        "auto",
        "Reference model: computed in each step from the initial weights (online), or once before the first step "
        "(precomputed); auto: online for adapters, precomputed for full and llama_pro",
        choices=("auto", "online", "precomputed"),
        needs=(PREFERENCE, WITH_REFERENCE),
        on_resume=OnResume.FREE,
    )
    share_prompts: bool = option(
        True,
        "Compute a prompt once for all of its answers; false: in separate rows",
        needs=(PREFERENCE_OR_RL,),
        on_resume=OnResume.FREE,
    )
