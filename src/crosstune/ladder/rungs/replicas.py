"""Give each process the whole model instead of a part of it."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within

SHARDED = ("full_shard", "shard_grad_op", "hybrid_full_shard", "hybrid_shard_grad_op")


def propose(now: Situation) -> list[Change]:
    if now.plan.world_size == 1:
        raise NotApplicable("one process has the whole model")
    if now.config.sharding_strategy not in SHARDED:
        raise NotApplicable(
            "processes are replicas already; gradients are reduced in buckets, and no unused ones are searched"
        )
    return [{"sharding_strategy": "ddp", "use_cpu_offload": False}]


RUNG = Rung(title="replicas (DDP)", order=130, gain="speed", promise=Within(bound=1e-5), propose=propose)
