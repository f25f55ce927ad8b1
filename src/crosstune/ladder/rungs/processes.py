"""Divide a step across several processes."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within

CORES_EACH = 2
"""CPU cores per process."""


def propose(now: Situation) -> list[Change]:
    plan, config = now.plan, now.config
    if plan.world_size > 1:
        raise NotApplicable(f"{plan.world_size} processes are used already")
    if plan.engine != "torch":
        raise NotApplicable("MLX uses one process on one device")
    rows = config.batch_size * config.gradient_accumulation_steps
    on_cpu = plan.backend.device == "cpu"
    number = plan.machine.num_cores // CORES_EACH if on_cpu else len(plan.backend.devices)
    number = max((n for n in range(1, number + 1) if rows % n == 0), default=1)
    if number < 2:
        raise NotApplicable(
            f"{plan.machine.num_cores} cores are best used by one process"
            if on_cpu
            else "there is one device"
        )
    batch = min(config.batch_size, rows // number)
    if rows % (batch * number):
        raise NotApplicable(f"{rows} rows per step cannot be divided among {number} processes")
    return [
        {
            "world_size": number,
            "sharding_strategy": "ddp",
            "batch_size": batch,
            "gradient_accumulation_steps": rows // (batch * number),
        }
    ]


RUNG = Rung(title="several processes", order=140, gain="speed", promise=Within(bound=1e-5), propose=propose)
