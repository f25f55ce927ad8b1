"""Check for option values that are wrong on any machine, or that contradict each other."""

from __future__ import annotations

from crosstune.config.draft import Draft
from crosstune.core.errors import UserError


def check_values(draft: Draft, method: str) -> None:
    """Add a problem or a warning to the draft for each of them."""
    if draft["max_steps"] != -1 and not draft.is_asked("num_epochs"):
        draft.values["num_epochs"] = 0  # max_steps alone decides when to stop
    if draft["num_epochs"] == 0 and draft["max_steps"] == -1:
        draft.problems.append(UserError("num_epochs is 0 and max_steps is not set.", do="set one of the two"))
    if draft.is_asked("warmup_steps") and draft.is_asked("warmup_ratio"):
        draft.problems.append(
            UserError("warmup_steps and warmup_ratio are both set.", do="keep one of the two")
        )
    must_be_positive = [
        ("lr", True),
        ("lora_alpha", method in ("lora", "dora")),
        ("loraplus_lr_ratio", method in ("lora", "dora")),
        ("grad_norm", draft["apply_gradient_clipping"]),
    ]
    for option, matters in must_be_positive:
        if matters and draft[option] == 0:
            draft.problems.append(
                UserError(f"{option} is 0.", why="nothing would be learned.", do="set a larger value")
            )
    if draft["lora_dropout"] == 1:
        draft.problems.append(
            UserError("lora_dropout is 1.", why="it would drop every input of the adapters.")
        )
    if (
        draft["warmup_steps"] is not None
        and draft["max_steps"] != -1
        and draft["warmup_steps"] > draft["max_steps"]
    ):
        draft.warn("warmup_steps", "is longer than the run: the learning rate never reaches its peak")
    if method == "llama_pro" and draft["base_adapter"]:
        draft.problems.append(
            UserError("base_adapter does not fit llama_pro.", why="llama_pro trains blocks, not adapters.")
        )
