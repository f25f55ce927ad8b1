"""Keep the newest checkpoints only."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, SameBits, Situation

KEPT = 3


def propose(now: Situation) -> list[Change]:
    if now.config.keep_last_n <= KEPT:
        raise NotApplicable(f"the newest {now.config.keep_last_n} are kept")
    return [{"keep_last_n": KEPT}]


RUNG = Rung(title="checkpoint rotation", order=150, gain="safety", promise=SameBits(), propose=propose)
