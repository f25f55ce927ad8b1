"""Describe a model that its recipe builds: parameters, data, and the bytes of weights and optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from crosstune.config.plan import Plan
from crosstune.core.memory import moment_bytes
from crosstune.planner.predict import DataFacts


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    parameters: int | None
    """None if the recipe does not provide it."""
    data: DataFacts | None

    def to_json(self, plan: Plan) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "state_bytes": state_bytes(plan, self.parameters) if self.parameters is not None else None,
            "num_steps": self.data.num_steps if self.data is not None else None,
        }


def state_bytes(plan: Plan, parameters: int) -> int:
    """Return the bytes of weights, gradients and optimizer state if everything is trained and nothing is sharded."""
    config, in_16_bits = plan.config, plan.precision in ("bf16", "fp16")
    weights = 2 + 4 if in_16_bits else 4  # 16-bit weights have an fp32 copy
    averages = 4 if config.ema_decay > 0 else 0
    return parameters * (weights + 4 + averages) + moment_bytes(parameters, config.optimizer)
