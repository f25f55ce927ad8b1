"""What `plan` can resolve but `train` cannot do yet. A row goes when its feature arrives."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.config.plan import Plan
from crosstune.core.errors import UserError

BUILT_METHODS = ("lora", "full")
BUILT_OPTIMIZERS = ("adamw", "fused_adamw", "adam", "fused_adam", "sgd", "adadelta")


def unbuilt(plan: Plan) -> Sequence[UserError]:
    """One error for each thing in the plan that has no code behind it yet."""
    config = plan.config
    rows = (
        (
            plan.engine != "torch",
            f"the {plan.engine} engine",
            "--backend cpu, or a torch backend that is available",
        ),
        (plan.method not in BUILT_METHODS, f"method {plan.method}", "--train_type lora or full"),
        (plan.quantizer != "none", f"a {plan.quantizer} quantized base", "--train_type lora"),
        (plan.world_size > 1, f"training on {plan.world_size} devices", "--world_size 1"),
        (config.packing, "--packing", "leave it out"),
        (
            config.resume != "none",
            "--resume",
            "--base_adapter RUN/adapter continues from an adapter's weights",
        ),
        (config.save_steps > 0, "--save_steps", "leave it out; the result is written at the end"),
        (config.optimizer not in BUILT_OPTIMIZERS, f"optimizer {config.optimizer}", "--optimizer adamw"),
        (config.log_to == "wandb", "--log_to wandb", "--log_to tqdm; metrics.jsonl holds every number"),
        (config.profile or config.profile_memory, "profiling", "leave it out"),
        (config.use_activation_cpu_offload, "--use_activation_cpu_offload", "--use_gradient_checkpointing"),
    )
    return [UserError(f"Not built yet: {what}.", do=do) for missing, what, do in rows if missing]
