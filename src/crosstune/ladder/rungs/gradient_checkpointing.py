"""Compute activations again in the backward pass instead of keeping them."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within


def propose(now: Situation) -> list[Change]:
    if now.config.use_gradient_checkpointing:
        raise NotApplicable("gradient checkpointing is on already")
    return [{"use_gradient_checkpointing": True}]


RUNG = Rung(
    title="gradient checkpointing", order=90, gain="memory", promise=Within(bound=1e-5), propose=propose
)
