"""Options that do nothing in the plan at hand: a user who set one is told so."""

from __future__ import annotations

from pathlib import Path

from crosstune.config.draft import Draft
from crosstune.config.mlx_settings import idle_settings
from crosstune.config.plan import TRAIN_TYPE_PARTS

_NEEDS_SEVERAL_DEVICES = (
    "sharding_strategy",
    "no_sync",
    "master_addr",
    "master_port",
    "use_cpu_offload",
    "distributed_backend",
)
_ON_NO_RING = ("sharding_strategy", "no_sync", "master_addr", "master_port", "use_cpu_offload")
_NEEDS_EVALUATION = (
    "eval_dataset",
    "eval_samples",
    "eval_metric",
    "eval_steps",
    "num_samples",
    "max_new_tokens",
)
_HAVE_FLOOR = ("cosine", "cosine_with_restarts", "exponential")
_NEEDS_ADAPTER = (
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "base_adapter",
    "use_rslora",
    "loraplus_lr_ratio",
)
_NEEDS_QUANTIZER = ("n_bits", "group_size", "quant_type", "double_quant")
_NEEDS_SAVING = ("keep_last_n", "keep_best", "keep_every")
_TORCH_ONLY = ("quant_type", "double_quant", "loading_workers", "reentrant_checkpointing")
_NEEDS_WANDB = ("project_name", "group", "entity")
_NEEDS_PROFILE = (
    "profiling_output",
    "with_stack",
    "with_shapes",
    "export_trace",
    "export_memory_timeline",
    "wait_steps",
    "profiler_warmup_steps",
    "active_steps",
    "repeat",
    "profiling_frequency",
)


def warn_without_effect(draft: Draft, *, method: str, quantizer: str, n_bits: int, world_size: int) -> None:
    idle: dict[str, str] = {}
    if world_size == 1:
        idle |= dict.fromkeys(_NEEDS_SEVERAL_DEVICES, "has no effect with one device")
    if method not in ("lora", "dora"):
        idle |= dict.fromkeys(_NEEDS_ADAPTER, f"has no effect with method {method}")
    if quantizer == "none":
        idle |= dict.fromkeys(_NEEDS_QUANTIZER, "has no effect without a quantized base")
    elif (quantizer, n_bits) != ("bnb", 4):
        idle["double_quant"] = f"has no effect with {quantizer} and {n_bits} bits"
    if n_bits == 8 and quantizer in ("bnb", "quanto"):
        idle["group_size"] = f"has no effect with {quantizer} and 8 bits, whose scales are by row"
    if not draft["profile"] and not draft["profile_memory"]:
        idle |= dict.fromkeys(_NEEDS_PROFILE, "has no effect without --profile")
    if draft["log_to"] != "wandb":
        idle |= dict.fromkeys(_NEEDS_WANDB, "has no effect without --log_to wandb")
    if draft.report.engine != "mlx":
        idle["mlx_config"] = (
            "its memory limits and compile have no effect outside the MLX engine; everything else in it does"
        )
    if draft["mlx_config"] is not None:
        without_metal = draft.report.engine == "mlx" and not draft.machine.system.startswith("Darwin")
        for reason in idle_settings(draft["mlx_config"], without_metal=without_metal):
            draft.warn("mlx_config", reason)
    if method != "llama_pro":
        idle["llama_pro_path"] = idle["num_new_blocks"] = "has no effect without a llama_pro train type"
    elif draft["llama_pro_path"]:
        idle["num_new_blocks"] = "has no effect with --llama_pro_path, whose blocks are there already"
    if not draft["use_gradient_checkpointing"]:
        idle["reentrant_checkpointing"] = "has no effect without --use_gradient_checkpointing"
    if not draft["apply_gradient_clipping"]:
        idle["grad_norm"] = "has no effect without --apply_gradient_clipping"
    if draft["skip_eval"] or draft["eval_samples"] == 0:
        idle |= dict.fromkeys(_NEEDS_EVALUATION, "has no effect without evaluation")
    if draft["lr_scheduler"] not in _HAVE_FLOOR:
        idle["cosine_min_lr_ratio"] = f"has no effect with lr_scheduler {draft['lr_scheduler']}"
    if quantizer == "none" and method != "llama_pro":
        idle["loading_workers"] = "has no effect without a quantized base"
    if TRAIN_TYPE_PARTS[draft["train_type"]][1] == "none":
        idle["no_4bit"] = f"has no effect with train_type {draft['train_type']}"
    if not draft["save_steps"] and not draft["save_minutes"]:
        idle |= dict.fromkeys(_NEEDS_SAVING, "has no effect without --save_steps or --save_minutes")
    if draft["resume"] == "none":
        idle["allow_mismatch"] = "has no effect without --resume"
    if draft.report.engine == "mlx":
        idle |= dict.fromkeys(_TORCH_ONLY, "has no effect on the MLX engine")
        if world_size > 1:
            idle |= dict.fromkeys(_ON_NO_RING, "has no effect on MLX: each process has the whole model")
    # A folder of quantized weights asks for all that its record has, which is no business of the user.
    folder = str(Path(draft["model_name"]).expanduser())
    for option, reason in idle.items():
        if draft.is_asked(option) and draft.asked.asked[option] != folder:
            draft.warn(option, reason)
