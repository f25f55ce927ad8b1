"""Keep activations instead of computing them again."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within


def propose(now: Situation) -> list[Change]:
    if not now.config.use_gradient_checkpointing:
        raise NotApplicable("gradient checkpointing is off")
    if now.config.low_memory:
        raise NotApplicable("--low_memory prefers memory to speed")
    return [{"use_gradient_checkpointing": False}]


RUNG = Rung(
    title="no gradient checkpointing", order=60, gain="speed", promise=Within(bound=1e-5), propose=propose
)
