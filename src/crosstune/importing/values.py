"""Convert values of other trainers' options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from crosstune.config.options.training import OPTIMIZERS
from crosstune.config.peer_names import PREFERENCE_LOSSES
from crosstune.core.names import plugin_names
from crosstune.core.schedule import SCHEDULES

Options: TypeAlias = Mapping[str, Any]


class Nothing(str):
    """The reason why a key sets no option: it does not affect the result of a run."""


class Noted(dict[str, Any]):
    """Options whose meaning differs in a way that the user should know."""

    def __init__(self, options: Options, note: str) -> None:
        super().__init__(options)
        self.note = note


class Missing(str):
    """Advice for a key without a counterpart."""


Found: TypeAlias = "Options | Missing | Nothing"
Convert: TypeAlias = Callable[[Any, Mapping[str, Any]], Found]
"""(value, all keys of the file) -> options."""

TWICE_THE_RANK, SCALE_OF_20, LAST_16 = "twice the rank", "20 times the rank", "the last 16 layers"
"""Defaults that follow from the rank or the model."""
_BY_EVALUATION = ("early_stopping_patience", "early_stopping_steps", "load_best_model_at_end")
_IN_STEPS = "pass --eval_steps N; `crosstune plan` shows how many steps an epoch has"
FILE_FOLDER = "folder of the file"
"""A key that the reader adds: the folder of the configuration file."""

_SCHEDULES = {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "cosine_annealing": "cosine",
    "get_cosine_schedule_with_warmup": "cosine",
}
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_hf": "adamw", "adamw_torch_fused": "fused_adamw", "adamw_bnb_8bit": "adamw_8bit",
    "lion_pytorch": "lion", "lion_32bit": "lion", "pagedadamw8bit": "paged_adamw_8bit", "pagedadamw": "adamw", "adamw8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw", "paged_adamw": "adamw", "adamw_torch_8bit": "adamw_8bit", "adamw_anyprecision": "adamw",
}  # fmt: skip


def is_off(value: Any) -> bool:
    """Return True for a value that switches a key off."""
    return value in (None, False, 0, "", "no", "none", "None", "false", "False") or value in ([], {})


def only_one(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value) or value == 1:
        return {}
    return Missing("crosstune shards weights (--sharding_strategy), not layers or sequences")


def same_as(key: str, option: str) -> Convert:
    """Return a rule that sets an option unless the value equals the value of `key`."""

    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        return {} if value == given.get(key) else {option: value}

    return convert


def at_steps(option: str) -> Convert:
    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        if is_off(value):
            return {}
        if isinstance(value, float) and value < 1:
            return Missing(f"--{option} is a number of steps, not a fraction of the run")
        return {option: int(value)}

    return convert


def per_epoch(option: str) -> Convert:
    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        if is_off(value):
            return {}
        evaluates = option == "eval_steps"
        if evaluates and any(given.get(key) for key in _BY_EVALUATION):
            return Missing(_IN_STEPS)
        if evaluates:
            return Noted(
                {"skip_eval": False},
                "evaluates before and after training; set eval_steps to evaluate in between",
            )
        return Nothing(
            "crosstune saves every 10 minutes and at the end; set save_steps for a number of steps"
        )

    return convert


def clipping(value: Any, given: Mapping[str, Any]) -> Found:
    return (
        {"apply_gradient_clipping": False}
        if is_off(value)
        else {"apply_gradient_clipping": True, "grad_norm": value}
    )


def epochs(value: Any, given: Mapping[str, Any]) -> Found:
    number = float(value)
    return (
        {"num_epochs": int(number)} if number == int(number) else Missing("use whole epochs, or --max_steps")
    )


def max_steps(value: Any, given: Mapping[str, Any]) -> Found:
    return {"max_steps": int(value)} if int(value) > 0 else {}


def schedule(value: Any, given: Mapping[str, Any]) -> Found:
    name = _SCHEDULES.get(last_part(value), last_part(value))
    if name in ("polynomial", "cosine_with_restarts"):
        return Missing(
            f"--lr_scheduler {name} differs: power 2 or 3 cycles, but 1 in transformers; use cosine or linear"
        )
    return (
        {"lr_scheduler": name} if name in SCHEDULES else Missing(f"use --lr_scheduler {', '.join(SCHEDULES)}")
    )


def schedule_options(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    if isinstance(value, Mapping) and set(value) == {"min_lr_rate"}:
        return {"cosine_min_lr_ratio": value["min_lr_rate"]}
    if isinstance(value, Mapping) and set(value) == {"min_lr"} and given.get("learning_rate"):
        return {"cosine_min_lr_ratio": float(value["min_lr"]) / float(given["learning_rate"])}
    return Missing("use --cosine_min_lr_ratio and --warmup_steps")


def warmup(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, float) and 0 < value < 1:
        return {"warmup_ratio": value}
    if not value and given.get("warmup_ratio") is not None:
        return Nothing("warmup_ratio is set")
    return {"warmup_steps": int(value or 0)}


def warmup_ratio(value: Any, given: Mapping[str, Any]) -> Found:
    if given.get("warmup_steps"):
        return Nothing("warmup_steps is set")
    return {"warmup_ratio": float(value or 0)}


def optimizer(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(value).lower()
    name = _OPTIMIZERS.get(name, name)
    return {"optimizer": name} if name in OPTIMIZERS else Missing(f"use --optimizer {', '.join(OPTIMIZERS)}")


def logging_steps(value: Any, given: Mapping[str, Any]) -> Found:
    return {"log_every_n_steps": max(1, int(value))} if float(value) >= 1 else Nothing("every step is logged")


def eval_strategy(value: Any, given: Mapping[str, Any]) -> Found:
    name = str(value).lower()
    if name in ("no", "false", "none"):
        return {"skip_eval": True}
    if name == "epoch":
        return per_epoch("eval_steps")(1, given)
    return {"skip_eval": False}


def recomputation(value: Any, given: Mapping[str, Any]) -> Found:
    if isinstance(value, Mapping) and set(value) <= {"use_reentrant"}:
        return {"reentrant_checkpointing": bool(value.get("use_reentrant", False))}
    return {} if is_off(value) else Missing("set these as options of crosstune")


def weight_dtype(value: Any, given: Mapping[str, Any]) -> Found:
    names = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}  # fmt: skip
    name = str(value).removeprefix("torch.").lower()
    if name in ("auto", "none"):
        return {}
    return {"precision": names[name]} if name in names else Missing("use --precision bf16, fp16 or fp32")


def attention(value: Any, given: Mapping[str, Any]) -> Found:
    return {} if is_off(value) else {"use_flash_attention": "flash" in str(value)}


def report_to(value: Any, given: Mapping[str, Any]) -> Found:
    names = [value] if isinstance(value, str) else list(value or [])
    known = [name for name in names if name in plugin_names("crosstune.tracking.trackers")]
    if set(names) - {*known, "none", "all"}:
        return Missing("crosstune does not log there; `crosstune options log_to` lists the trackers")
    return {"log_to": ",".join(["tqdm", *known])} if known else {}


def auto_resume(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert resuming from a run's own checkpoints, which needs its name."""
    if is_off(value):
        return {}
    name = given.get("wandb_name") or Path(str(given.get("output_dir") or "imported")).name
    return {"resume": "auto", "name": str(name)}


def deepspeed(value: Any, given: Mapping[str, Any]) -> Found:
    if is_off(value):
        return {}
    stage = re.search(r"z(?:ero)?_?([0-3])", str(value).lower())
    if stage is None:
        return Missing(
            "pass --sharding_strategy full_shard (ZeRO-3), shard_grad_op (ZeRO-2) or ddp to this command"
        )
    return {"sharding_strategy": {"0": "ddp", "3": "full_shard"}.get(stage[1], "shard_grad_op")}


def fsdp(value: Any, given: Mapping[str, Any]) -> Found:
    words = value.split() if isinstance(value, str) else list(value or [])
    strategies = [
        word for word in words if word in ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
    ]
    if not words:
        return {}
    if strategies in (["hybrid_shard"], ["no_shard"]) or len(strategies) > 1:
        return Missing("pass --sharding_strategy full_shard, shard_grad_op or ddp to this command")
    offload = {"use_cpu_offload": True} if "offload" in words else {}
    return {"sharding_strategy": strategies[0] if strategies else "full_shard", **offload}


def targets(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert names of layers, which select by the end of full names in crosstune too, or a regex for full names."""
    if is_off(value):
        return {}
    names = [value] if isinstance(value, str) else [str(name) for name in value]
    if isinstance(value, str) and not re.search(r"[()|*\[\\^$]", value):
        names = [part.strip() for part in value.split(",")]
    return {"lora_target_modules": "all" if names in (["all"], ["all-linear"]) else ",".join(names)}


def init_lora(value: Any, given: Mapping[str, Any]) -> Found:
    names = {"true": "default", "pissa": "pissa", "orthogonal": "orthogonal", "loftq": "loftq"}
    name = str(value).lower()
    if name == "gaussian":
        return Missing("--init_lora default draws A uniformly")
    if is_off(value):
        return {}
    return {"init_lora": names[name]} if name in names else Missing("crosstune has no counterpart")


def loftq(value: Any, given: Mapping[str, Any]) -> Found:
    return {} if is_off(value) else {"init_lora": "loftq"}


def bits(number: int) -> Convert:
    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        if is_off(value):
            return {}
        if given.get("full_finetuning"):
            return Missing("full fine-tuning has no quantized base; remove one of the two")
        return {"train_type": "qlora", "n_bits": number}

    return convert


def unsloth_bits(value: Any, given: Mapping[str, Any]) -> Found:
    """Convert load_in_4bit of Unsloth, which is on by default."""
    is_other = given.get("full_finetuning") or given.get("load_in_8bit")
    return {"train_type": "lora"} if is_off(value) and not is_other else bits(4)(value, given)


def quantization_bit(value: Any, given: Mapping[str, Any]) -> Found:
    return {} if is_off(value) else {"train_type": "qlora", "n_bits": int(value)}


def trl_trainer(value: Any, given: Mapping[str, Any]) -> Found:
    if value == "reward":
        return {"recipe": "judge", "head": "scalar"}
    if value in ("dpo", "kto", "orpo", "cpo"):
        return {"recipe": "preference", "preference_loss": value}
    if value in ("grpo", "rloo"):
        # The default of GRPOConfig.loss_type, which a given value replaces.
        return {"recipe": "rl", "rl_loss": "rloo" if value == "rloo" else "dapo"}
    if value in ("gkd", "distillation"):
        names = {"beta": "distill_beta", "lmbda": "on_policy_share", "temperature": "distill_temperature"}
        defaults = (0.5, 0.5, 0.9) if value == "gkd" else (1.0, 1.0, 1.0)
        kept = {
            names[name]: number for name, number in zip(names, defaults, strict=True) if name not in given
        }
        return {"recipe": "distill", "distill_loss": "jsd", **kept}
    if value == "sft":
        return {"recipe": "sft"}
    return Missing(
        f"crosstune has no counterpart of {value}; "
        "pass --recipe sft, preference, rl, distill or judge to this command"
    )


def distilled(option: str) -> Convert:
    """Return a rule for a key that means another option in TRL's distillation."""

    def convert(value: Any, given: Mapping[str, Any]) -> Found:
        return {f"distill_{option}" if given.get("trainer") in ("gkd", "distillation") else option: value}

    return convert


def peft_config(value: Any, given: Mapping[str, Any]) -> Found:
    computed = Missing("it is computed by the program; pass --train_type lora or full to this command")
    return {"train_type": "lora"} if value == "LoraConfig" else computed


def trl_loss(value: Any, given: Mapping[str, Any]) -> Found:
    names = [value] if isinstance(value, str) else list(value or [])
    if names in ([], ["nll"]):
        return {}
    if given.get("trainer") == "grpo":
        known = [name for name in names if name in ("grpo", "dr_grpo", "dapo", "bnpo")]
        return {"rl_loss": known[0]} if known else Missing(f"no loss of --rl_loss is {names[0]}")
    if unknown := [name for name in names if name not in {*PREFERENCE_LOSSES, "sft"}]:
        return Missing(f"no loss of --preference_loss is {unknown[0]}")
    if given.get("trainer") == "cpo" and names != ["simpo"]:
        return (
            {"preference_loss": "cpo"} if names == ["sigmoid"] else Missing("CPO's losses are cpo and simpo")
        )
    weights = given.get("loss_weights") or given.get("dpo_loss_weights")
    chosen = [PREFERENCE_LOSSES.get(name, name) for name in names]
    if weights:
        chosen = [f"{name}:{weight}" for name, weight in zip(chosen, weights, strict=False)]
    return {"recipe": "preference", "preference_loss": ",".join(chosen)}


def last_part(value: Any) -> str:
    """Return the last part of a dotted name."""
    return str(value).rpartition(".")[2]


def resolve_references(text: str, given: Mapping[str, Any]) -> str:
    """Replace ${key} by the values of other keys."""
    return re.sub(r"\$\{([\w.]+)\}", lambda found: str(given.get(found[1], found[0])), text)
