"""Use a fused attention kernel."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within


def propose(now: Situation) -> list[Change]:
    kind, why = now.plan.attention
    if now.config.use_flash_attention is not False:
        raise NotApplicable(f"{kind} is used already ({why})")
    if not now.plan.backend.has_flash_attention:
        raise NotApplicable(f"no fused kernel ran on {now.plan.backend.name} here")
    return [{"use_flash_attention": True}]


RUNG = Rung(title="fused attention", order=30, gain="speed", promise=Within(bound=1e-2), propose=propose)
