"""Read the configuration files of the original latent-diffusion trainer, such as mmdit_stable.yaml, as options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from crosstune.core.errors import UserError, shown

TYPE = "multimodal_mmdit"
"""The `model.type` of such a file."""

_SAME_NAMES = {
    "model": "hidden_size n_blocks n_heads cond_dim dropout latent_dim latent_parameterization use_gradient_checkpointing",
    "training": "seed num_epochs warmup_steps resume gradient_accumulation_steps mode_weights cfg_dropout_prob",
    "loss": "loss_type latent_loss_weight text_loss_weight",
    "optimizer": "lr",
}
OPTIONS: Mapping[str, str] = {
    **{f"{section}.{name}": name for section, names in _SAME_NAMES.items() for name in names.split()},
    "data.max_samples": "dataset_samples",
    "data.max_val_samples": "eval_samples",
    "model.max_seq_len": "context_length",
    "training.compile_model": "torch_compile",
    "training.train_batch_size": "batch_size",
    "training.num_train_steps": "max_steps",
    "training.dtype": "precision",
    "training.lr_schedule": "lr_scheduler",
    "logging.run_name": "name",
    "logging.save_dir": "output_dir",
    "logging.log_freq": "log_every_n_steps",
    "logging.eval_freq": "eval_steps",
    "logging.save_freq": "save_steps",
    "optimizer.weight_decay": "wd",
    "optimizer.grad_clip_norm": "grad_norm",
}
"""Original key -> option."""

_UNUSED = {
    # A thread prepares batches from the pairs folder.
    "data": "data_dir data_files load_tokens num_workers initial_scan_limit tokenizer_path use_preprocessed val_ratio "
    "token_dir latent_dir",
    # Noise is continuous in time, with alpha = cos(pi t / 2). The original reads none of these keys.
    "model": "latent_timesteps latent_beta_schedule latent_beta_min latent_beta_max t_eps num_residual_streams",
    "training": "eval_batch_size",
    "logging": "num_eval_batches",
    # The original uses torch's defaults too.
    "optimizer": "beta1 beta2 eps name type",
}
WITHOUT_EFFECT = {f"{section}.{name}" for section, names in _UNUSED.items() for name in names.split()}
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
"""Original key -> values that this recipe supports."""


def is_mmdit(data: Any) -> bool:
    model = data.get("model") if isinstance(data, dict) else None
    return isinstance(model, dict) and model.get("type") == TYPE


def translate(data: Mapping[Any, Any], path: Any, problems: list[UserError]) -> dict[str, Any]:
    """Return the options of a file; add a problem for each unknown or unsupported key."""
    found: dict[str, Any] = {"recipe": "latent_diffusion", "train_type": "full"}
    for section, keys in data.items():
        if not isinstance(keys, dict):
            problems.append(UserError(f"{shown(section)} in {path} is not a section of options."))
            continue
        for key, value in keys.items():
            _add(found, f"{section}.{key}", value, path, problems)
    if (dataset := _dataset(data.get("data"))) is not None:
        found["dataset"] = dataset
    if found.get("max_steps", -1) != -1:  # the number of steps determines the end
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
    elif key not in FIXED:
        if key not in WITHOUT_EFFECT and not key.startswith("logging.wandb_"):
            do = "remove it; see docs/guide/latent-diffusion.md"
            problems.append(UserError(f"Unknown option: {shown(key)} in {path}.", do=do))
    elif value not in FIXED[key]:
        allowed = " or ".join(map(str, FIXED[key]))
        why, do = f"crosstune trains with {allowed}.", f"set it to {allowed}, or remove it"
        problems.append(UserError(f"{key} is {shown(value)} in {path}.", why=why, do=do))


def _dataset(data: Any) -> str | None:
    """Return the data folder, to import with `crosstune latents build`."""
    if not isinstance(data, dict):
        return None
    if isinstance(data.get("data_dir"), str):
        return str(data["data_dir"])
    tokens = data.get("token_dir")
    if not isinstance(tokens, str) or not tokens:
        return None
    parts = PurePath(tokens)
    return str(parts.parent.parent if parts.parent.name == "tokens" else parts.parent)
