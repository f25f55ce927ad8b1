"""Read the configuration files of the original latent-diffusion trainer, such as mmdit_stable.yaml, as options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from crosstune.core.errors import UserError, shown

TYPE = "multimodal_mmdit"
"""The value of `model.type` that tells such a file."""

OPTIONS: Mapping[str, str] = {
    "data.max_samples": "dataset_samples",
    "data.max_val_samples": "eval_samples",
    "model.hidden_size": "hidden_size",
    "model.n_blocks": "n_blocks",
    "model.n_heads": "n_heads",
    "model.cond_dim": "cond_dim",
    "model.max_seq_len": "context_length",
    "model.dropout": "dropout",
    "model.latent_dim": "latent_dim",
    "model.latent_parameterization": "latent_parameterization",
    "model.use_gradient_checkpointing": "use_gradient_checkpointing",
    "training.compile_model": "torch_compile",
    "training.seed": "seed",
    "training.train_batch_size": "batch_size",
    "training.num_epochs": "num_epochs",
    "training.num_train_steps": "max_steps",
    "training.dtype": "precision",
    "training.lr_schedule": "lr_scheduler",
    "training.warmup_steps": "warmup_steps",
    "training.resume": "resume",
    "training.gradient_accumulation_steps": "gradient_accumulation_steps",
    "training.mode_weights": "mode_weights",
    "training.cfg_dropout_prob": "cfg_dropout_prob",
    "loss.loss_type": "loss_type",
    "loss.latent_loss_weight": "latent_loss_weight",
    "loss.text_loss_weight": "text_loss_weight",
    "logging.run_name": "name",
    "logging.save_dir": "output_dir",
    "logging.log_freq": "log_every_n_steps",
    "logging.eval_freq": "eval_steps",
    "logging.save_freq": "save_steps",
    "optimizer.lr": "lr",
    "optimizer.weight_decay": "wd",
    "optimizer.grad_clip_norm": "grad_norm",
}
"""Their key -> the option that means the same."""

WITHOUT_EFFECT = frozenset(
    {
        # Data is read from a folder of pairs by a thread ahead of the step.
        *(
            "data.data_dir",
            "data.data_files",
            "data.load_tokens",
            "data.num_workers",
            "data.initial_scan_limit",
        ),
        *(
            "data.tokenizer_path",
            "data.use_preprocessed",
            "data.val_ratio",
            "data.token_dir",
            "data.latent_dir",
        ),
        # The noise is continuous in time, with alpha = cos(pi t / 2); the original reads these keys nowhere.
        *(
            "model.latent_timesteps",
            "model.latent_beta_schedule",
            "model.latent_beta_min",
            "model.latent_beta_max",
        ),
        *(
            "model.t_eps",
            "model.num_residual_streams",
            "training.eval_batch_size",
            "logging.num_eval_batches",
        ),
        # The original reads neither; the betas and epsilon here are torch's defaults.
        *("optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.name", "optimizer.type"),
    }
)
FIXED: Mapping[str, tuple[Any, ...]] = {
    "model.type": (TYPE,),
    "model.diffusion_process": ("mdlm",),
    "model.latent_diffusion_process": ("continuous",),
    "model.qk_rmsnorm": (True,),
    "model.cluster_size": (0,),
    "model.p_uniform": (0,),
    "loss.loss_scale": (1,),
    "loss.reduction": ("tokenmean",),
    "loss.use_cross_entropy": (True,),
    "loss.text_kl_weight": (0, None),
}
"""Their key -> the values that mean what is done here."""


def is_mmdit(data: Any) -> bool:
    model = data.get("model") if isinstance(data, dict) else None
    return isinstance(model, dict) and model.get("type") == TYPE


def translate(data: Mapping[Any, Any], path: Any, problems: list[UserError]) -> dict[str, Any]:
    """Return the options of a file; add a problem for each key that means something else here."""
    found: dict[str, Any] = {"recipe": "latent_diffusion", "train_type": "full"}
    for section, keys in data.items():
        if not isinstance(keys, dict):
            problems.append(UserError(f"{shown(section)} in {path} is not a section of options."))
            continue
        for key, value in keys.items():
            _add(found, f"{section}.{key}", value, path, problems)
    if (dataset := _dataset(data.get("data"))) is not None:
        found["dataset"] = dataset
    if found.get("max_steps", -1) != -1:  # a run stops at the number of steps, as its users meant
        found.pop("num_epochs", None)
    return found


def _add(found: dict[str, Any], key: str, value: Any, path: Any, problems: list[UserError]) -> None:
    if key in OPTIONS:
        if value is not None:
            found[OPTIONS[key]] = value
    elif key == "optimizer.use_fused":
        found["optimizer"] = "fused_adamw" if value else "adamw"
    elif key == "training.sequential_schedule" and isinstance(value, list):
        found["sequential_schedule"] = ",".join(
            f"{phase.get('type')}:{phase.get('steps')}" for phase in value if isinstance(phase, dict)
        )
    elif key in FIXED:
        if value not in FIXED[key]:
            allowed = " or ".join(map(str, FIXED[key]))
            problems.append(
                UserError(
                    f"{key} is {shown(value)} in {path}.",
                    why=f"crosstune trains with {allowed}.",
                    do=f"set it to {allowed}, or remove it",
                )
            )
    elif key not in WITHOUT_EFFECT and not key.startswith("logging.wandb_"):
        problems.append(
            UserError(
                f"Unknown option: {shown(key)} in {path}.", do="remove it; see docs/guide/latent-diffusion.md"
            )
        )


def _dataset(data: Any) -> str | None:
    """Return the folder that the keys of the data name: its layout is imported with `crosstune latents build`."""
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("data_dir"), str):
        return str(data["data_dir"])
    tokens = data.get("token_dir")
    if not isinstance(tokens, str) or not tokens:
        return None
    parts = PurePath(tokens)
    return str(parts.parent.parent if parts.parent.name == "tokens" else parts.parent)
