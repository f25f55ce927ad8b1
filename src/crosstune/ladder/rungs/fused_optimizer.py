"""Update all weights in one kernel."""

from crosstune.ladder.rung import Change, NotHere, Rung, Situation, Within

FUSED = {"adamw": "fused_adamw", "adam": "fused_adam"}


def propose(now: Situation) -> list[Change]:
    if now.plan.engine != "torch":
        raise NotHere("MLX has one form of each optimizer")
    if now.config.optimizer not in FUSED:
        raise NotHere(f"{now.config.optimizer} has no fused form")
    if now.config.optimizer == "adamw" and now.plan.backend.device == "cuda":
        raise NotHere("adamw is fused on a GPU already")
    return [{"optimizer": FUSED[now.config.optimizer]}]


RUNG = Rung(title="fused optimizer", order=50, gain="speed", promise=Within(bound=1e-3), propose=propose)
