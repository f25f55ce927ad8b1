"""Prepare batches beside the step."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, SameBits, Situation


def propose(now: Situation) -> list[Change]:
    pinned = ", in pinned memory" if now.plan.backend.device == "cuda" else ""
    raise NotApplicable(f"always on: a thread prepares micro-batches ahead of the step{pinned}")


RUNG = Rung(title="data loading", order=20, gain="speed", promise=SameBits(), propose=propose)
