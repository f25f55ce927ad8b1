"""Compute in 16 bits if the device is faster with them."""

from crosstune.ladder.rung import AsGood, Change, NotApplicable, Rung, Situation

WORTHWHILE = 1.1
"""Minimum speed of bf16 relative to fp32 matmuls that is worth a trial."""


def propose(now: Situation) -> list[Change]:
    backend = now.plan.backend
    if now.plan.precision != "fp32":
        raise NotApplicable(f"the precision is {now.plan.precision} already")
    if "bfloat16" in backend.dtypes and (backend.device != "cpu" or backend.bf16_speedup >= WORTHWHILE):
        return [{"precision": "bf16_autocast"}, {"precision": "bf16"}]
    if "float16" in backend.dtypes and backend.device != "cpu":
        return [{"precision": "fp16_autocast"}]
    raise NotApplicable(f"16-bit matmuls are not faster than fp32 on this {backend.name}")


RUNG = Rung(title="16-bit arithmetic", order=40, gain="speed", promise=AsGood(bound=0.02), propose=propose)
