"""Use larger micro-batches with the same rows per step."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within

MAX_DOUBLINGS = 4


def propose(now: Situation) -> list[Change]:
    batch, micro_batches = now.config.batch_size, now.config.gradient_accumulation_steps
    if now.config.rows_per_step:
        raise NotApplicable("--rows_per_step sets how a step is divided")
    changes: list[Change] = []
    while micro_batches % 2 == 0 and len(changes) < MAX_DOUBLINGS:
        batch, micro_batches = batch * 2, micro_batches // 2
        changes.append({"batch_size": batch, "gradient_accumulation_steps": micro_batches})
    if not changes:
        raise NotApplicable(
            "a step has an odd number of micro-batches" if micro_batches > 1 else "a step is one micro-batch"
        )
    return changes


RUNG = Rung(
    title="larger micro-batches, same rows per step",
    order=80,
    gain="speed",
    promise=Within(bound=1e-3),
    propose=propose,
)
