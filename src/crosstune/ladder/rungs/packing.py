"""Pack examples into full rows, with about the same number of examples per step."""

from crosstune.ladder.rung import AsGood, Change, NotApplicable, Rung, Situation

ROUNDED_TO = 64
FULL_ENOUGH = 0.8
"""The ratio of mean to longest length above which packing gains nothing."""


def propose(now: Situation) -> list[Change]:
    config = now.config
    if config.recipe != "sft":
        raise NotApplicable("only rows of the sft recipe are packed by the ladder")
    if config.packing:
        raise NotApplicable("rows are packed already")
    if not now.mean_tokens or now.mean_tokens > FULL_ENOUGH * now.longest_tokens:
        raise NotApplicable("all examples have about the same length")
    rows = config.batch_size * config.gradient_accumulation_steps
    wanted = max(now.longest_tokens, round(rows * now.mean_tokens))
    length = min(config.context_length, -(-wanted // ROUNDED_TO) * ROUNDED_TO)
    per_step = max(1, round(rows * now.mean_tokens / length))
    return [
        {
            "packing": True,
            "context_length": length,
            "batch_size": min(config.batch_size, per_step),
            "gradient_accumulation_steps": max(1, per_step // min(config.batch_size, per_step)),
        }
    ]


RUNG = Rung(title="packing", order=70, gain="speed", promise=AsGood(bound=0.1), propose=propose)
