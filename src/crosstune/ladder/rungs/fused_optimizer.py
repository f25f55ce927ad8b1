"""Update all weights in one kernel."""

from crosstune.ladder.rung import Change, NotApplicable, Rung, Situation, Within

FUSED = {"adamw": "fused_adamw", "adam": "fused_adam"}


def propose(now: Situation) -> list[Change]:
    if now.plan.engine != "torch":
        raise NotApplicable("MLX has one form of each optimizer")
    if now.config.optimizer not in FUSED:
        raise NotApplicable(f"{now.config.optimizer} has no fused version")
    if now.config.optimizer == "adamw" and now.plan.backend.device == "cuda":
        raise NotApplicable("adamw is fused on a GPU already")
    return [{"optimizer": FUSED[now.config.optimizer]}]


RUNG = Rung(title="fused optimizer", order=50, gain="speed", promise=Within(bound=1e-3), propose=propose)
