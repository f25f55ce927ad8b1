"""Run decoder layers with adapters through fused operations."""

from crosstune.config.conditions import shards_weights
from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within


def propose(now: Situation) -> list[Change]:
    if now.plan.engine != "torch" or now.plan.method != "lora" or now.config.recipe != "sft":
        raise NotApplicable("the fast layers train LoRA adapters of language models with torch")
    if now.config.kernels == "fast":
        raise NotApplicable("the fast layers are used already")
    if now.plan.world_size > 1 and shards_weights(now.config.sharding_strategy):
        raise NotApplicable("the fast layers need whole weights")
    return [{"kernels": "fast"}]


RUNG = Rung(title="fast layers", order=45, gain="speed", promise=Within(bound=1e-2), propose=propose)
