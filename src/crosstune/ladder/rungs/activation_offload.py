"""Keep activations in host memory until the backward pass."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, SameBits, Situation


def propose(now: Situation) -> list[Change]:
    backend = now.plan.backend
    if now.plan.engine != "torch" or backend.device == "cpu" or backend.unified_memory:
        raise NotApplicable(f"{backend.name} has no memory of its own to spare")
    if now.config.use_activation_cpu_offload:
        raise NotApplicable("activations are in host memory already")
    return [{"use_activation_cpu_offload": True}]


RUNG = Rung(title="activations in host memory", order=100, gain="memory", promise=SameBits(), propose=propose)
