"""What `plan` can resolve but `train` cannot do yet. A row goes when its feature arrives."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.config.plan import Plan
from crosstune.core.errors import UserError


def unbuilt(plan: Plan) -> Sequence[UserError]:
    """One error for each thing in the plan that has no code behind it yet."""
    config = plan.config
    rows = (
        (
            plan.engine == "mlx" and plan.method == "llama_pro",
            "llama_pro on MLX",
            "--train_type lora, or a torch backend",
        ),
        (
            plan.engine == "torch" and plan.world_size > 1,
            f"training on {plan.world_size} devices",
            "--world_size 1",
        ),
        (config.log_to == "wandb", "--log_to wandb", "--log_to tqdm; metrics.jsonl holds every number"),
        (config.profile or config.profile_memory, "profiling", "leave it out"),
        (config.use_activation_cpu_offload, "--use_activation_cpu_offload", "--use_gradient_checkpointing"),
    )
    return [UserError(f"Not built yet: {what}.", do=do) for missing, what, do in rows if missing]
