"""Compile the blocks of the model."""

from crosstune.config.check_compiler import missing_compiler
from crosstune.config.conditions import shards_weights
from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within


def propose(now: Situation) -> list[Change]:
    if now.plan.engine != "torch":
        raise NotApplicable("torch.compile is torch's; MLX compiles its steps by itself on a GPU")
    if now.config.torch_compile:
        raise NotApplicable("the blocks are compiled already")
    if now.config.kernels == "fast":
        raise NotApplicable("the fast layers have their own kernels")
    if now.plan.world_size > 1 and shards_weights(now.config.sharding_strategy):
        raise NotApplicable("sharded weights are not compiled")
    if missing := missing_compiler(now.plan.backend.name):
        raise NotApplicable(f"torch.compile needs {missing} on {now.plan.backend.name}")
    return [{"torch_compile": True}]


RUNG = Rung(title="compiled blocks", order=47, gain="speed", promise=Within(bound=1e-2), propose=propose)
