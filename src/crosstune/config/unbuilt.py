"""What `plan` can resolve but `train` cannot do yet. An entry goes when its feature arrives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from crosstune.config.conditions import Decided


@dataclass(frozen=True, kw_only=True)
class Unbuilt:
    words: str
    """For the table of options."""
    what: str
    """For the error; may name what `Decided.words` has."""
    do: str
    needed: Callable[[Decided], bool]
    """Whether a plan cannot run without it."""


LLAMA_PRO_ON_MLX = Unbuilt(
    words="llama_pro on MLX",
    what="llama_pro on MLX",
    do="--train_type lora, or a torch backend",
    needed=lambda now: now.engine == "mlx" and now.method == "llama_pro",
)
SEVERAL_TORCH_DEVICES = Unbuilt(
    words="several devices with the torch engine",
    what="training on {world_size} devices",
    do="--world_size 1",
    needed=lambda now: now.engine == "torch" and now.world_size > 1,
)
WANDB_LOG = Unbuilt(
    words="`--log_to wandb`",
    what="--log_to wandb",
    do="--log_to tqdm; metrics.jsonl holds every number",
    needed=lambda now: now.options["log_to"] == "wandb",
)
PROFILER = Unbuilt(
    words="profiling",
    what="profiling",
    do="leave it out",
    needed=lambda now: bool(now.options["profile"] or now.options["profile_memory"]),
)
ACTIVATION_OFFLOAD = Unbuilt(
    words="activations in host memory",
    what="--use_activation_cpu_offload",
    do="--use_gradient_checkpointing",
    needed=lambda now: bool(now.options["use_activation_cpu_offload"]),
)
