"""End a run that hangs within half an hour, and let NCCL overlap with computation."""

from crosstune.config.time_limits import LONGEST_S, SHORTEST_S, limits_of
from crosstune.ladder.rung import Change, NotApplicable, Rung, SameBits, Situation

SAFE = "30m"


def propose(now: Situation) -> list[Change]:
    if now.plan.world_size == 1:
        raise NotApplicable("one process waits for no other")
    limits = limits_of(now.config)
    if SHORTEST_S <= limits.collective_s <= LONGEST_S and limits.heartbeat_s <= LONGEST_S:
        raise NotApplicable(f"the limit of a collective is {limits.collective_s:g} s already")
    return [{"collective_timeout": SAFE, "heartbeat_timeout": SAFE}]


RUNG = Rung(title="time-outs that end a hang", order=10, gain="safety", promise=SameBits(), propose=propose)
