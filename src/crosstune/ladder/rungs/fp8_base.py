"""Multiply with the frozen base in 8-bit floats."""

from crosstune.ladder.rung import AsGood, Change, NotApplicable, Rung, Situation


def propose(now: Situation) -> list[Change]:
    if now.plan.backend.name != "cuda":
        raise NotApplicable("8-bit float products need an NVIDIA GPU")
    if now.config.kernels != "fast" or now.plan.method != "lora":
        raise NotApplicable("only the fast layers with LoRA multiply in fp8")
    if now.config.base_precision == "fp8":
        raise NotApplicable("the base is multiplied in fp8 already")
    return [{"base_precision": "fp8"}]


RUNG = Rung(title="fp8 base", order=47, gain="speed", promise=AsGood(bound=0.02), propose=propose)
