"""Keep the optimizer's moments in 8 bits."""

from crosstune.ladder.rung import AsGood, Change, NotApplicable, Rung, Situation

EIGHT_BIT = {"adamw": "adamw_8bit", "fused_adamw": "adamw_8bit"}


def propose(now: Situation) -> list[Change]:
    config, backend = now.config, now.plan.backend
    if config.optimizer not in EIGHT_BIT:
        raise NotApplicable(f"{config.optimizer} has no form with moments in 8 bits")
    if now.plan.method in ("lora", "dora"):
        raise NotApplicable("the moments of adapters are small")
    if "bnb" not in backend.quantizers:
        raise NotApplicable(f"bitsandbytes does not run on {backend.name} here")
    return [{"optimizer": EIGHT_BIT[config.optimizer]}]


RUNG = Rung(title="8-bit optimizer", order=110, gain="memory", promise=AsGood(bound=0.02), propose=propose)
