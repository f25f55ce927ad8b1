"""Map other trainers' option names to crosstune's: transformers and TRL, PEFT, Unsloth, axolotl, LLaMA-Factory, torchtune
and mlx-lm.

A name with exactly the same meaning is accepted as an alias. For any other name, an error shows the replacement: an option
with a merely similar meaning would silently change the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def _by_name(groups: Mapping[str, T]) -> dict[str, T]:
    """Return name -> value from groups of names, separated by spaces."""
    return {name: value for names, value in groups.items() for name in names.split()}


SAME: Mapping[str, str] = _by_name(
    {
        "model_name_or_path pretrained_model_name_or_path base_model model_id": "model_name",
        "adapter_name_or_path lora_model_dir": "base_adapter",
        "data dataset_name": "dataset",
        "cutoff_len sequence_len max_seq_len max_length model_max_length block_size": "context_length",
        "sample_packing neat_packing packed": "packing",
        "train_on_inputs train_on_input": "train_on_prompt",
        "lora_r": "lora_rank",
        "lora_target target_modules": "lora_target_modules",
        "lora_modules_to_save additional_target": "modules_to_save",
        "tokens": "add_tokens",
        "peft_layers_to_transform": "layers_to_transform",
        "rslora peft_use_rslora": "use_rslora",
        "per_device_train_batch_size micro_batch_size": "batch_size",
        "per_device_eval_batch_size val_batch_size": "eval_batch_size",
        "grad_accumulation_steps": "gradient_accumulation_steps",
        "num_train_epochs": "num_epochs",
        "iters": "max_steps",
        "optim": "optimizer",
        "lr_scheduler_type": "lr_scheduler",
        "clip_grad_norm": "grad_norm",
        "neftune_noise_alpha noisy_embedding_alpha": "neftune_alpha",
        "random_state": "seed",
        "gradient_checkpointing grad_checkpoint enable_activation_checkpointing": "use_gradient_checkpointing",
        "enable_activation_offloading activation_offloading": "use_activation_cpu_offload",
        "flash_attention": "use_flash_attention",
        "run_name": "name",
        "save_total_limit": "keep_last_n",
        "save_every": "save_steps",
        "steps_per_eval": "eval_steps",
        "logging_steps steps_per_report": "log_every_n_steps",
        "report_to": "log_to",
        "wandb_project": "project_name",
        "wandb_entity": "entity",
        "wandb_group": "tracker_group",
        "dpo_beta pref_beta rl_beta": "beta",
        "dpo_label_smoothing": "label_smoothing",
        "pref_ftx rpo_alpha cpo_alpha": "sft_weight",
        "center_rewards_coefficient": "center_rewards",
        "teacher_model teacher_model_name_or_path": "teacher",
        "lmbda": "on_policy_share",
        "kd_temperature": "distill_temperature",
        "sft_alpha": "ce_weight",
        "kto_chosen_weight kto_desirable_weight": "desirable_weight",
        "kto_rejected_weight kto_undesirable_weight": "undesirable_weight",
    }
)
"""Their name -> option with the same meaning."""

PREFERENCE_LOSSES = {
    "sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust", "nca_pair": "nca", "bco_pair": "bco",
    "sppo_hard": "sppo", "apo_zero": "apo_zero", "apo_down": "apo_down", "orpo": "orpo", "simpo": "simpo", "kto": "kto",
    "cpo": "cpo",
}  # fmt: skip

SAME_FOR_VALUES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "mask_prompt": ("train_on_prompt", {"true": False, "false": True}, "--train_on_prompt"),
    "lora_target_linear": ("lora_target_modules", {"true": "all"}, "--lora_target_modules with the names"),
    **dict.fromkeys(
        ("finetuning_type", "fine_tune_type", "adapter"),
        (
            "train_type",
            {name: name for name in ("lora", "qlora", "dora", "full")},
            "--train_type; to train only a few layers, use llama_pro; to start from an adapter, --base_adapter FOLDER",
        ),
    ),
    "stage": (
        "head",
        {"rm": "scalar"},
        "--recipe; `crosstune judge train --head scalar` trains reward models",
    ),
    "reward_model": ("head", {"true": "scalar"}, "`crosstune judge train --head scalar`"),
}
"""Their name -> (option, their value -> our value, advice for any other value)."""

SAME_VALUES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {
        "adamw_torch": "adamw",
        "adamw_hf": "adamw",
        "adamw_torch_fused": "fused_adamw",
        "adamw_bnb_8bit": "adamw_8bit",
        "lion_32bit": "lion",
        "lion_pytorch": "lion",
    },
    "lora_target_modules": {"all-linear": "all"},
    "resume": {"true": "auto", "false": "none"},
    "use_gradient_checkpointing": {"unsloth": "true"},
}
"""Option -> their value -> our value."""

_AUTO_PRECISION = "by default crosstune uses the best precision that the machine supports"
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN in the environment; a token in a command would be saved in files"
_SEVERAL = "--sharding_strategy full_shard --world_size N shards the model across N devices"

DIFFERENT: Mapping[str, str] = _by_name(
    {
        "steps": "--max_steps N",
        "gpus num_gpus n_gpus": "--world_size N; CUDA_VISIBLE_DEVICES chooses the devices",
        "gpu cuda": "--backend cuda; CUDA_VISIBLE_DEVICES chooses the devices",
        "device device_map": "--backend cuda, rocm, xpu, mps, mlx or cpu; auto uses the first available",
        "use_cpu no_cuda cpu": "--backend cpu",
        "deepspeed fsdp fsdp_config nproc_per_node": _SEVERAL,
        "load_in_4bit": "--train_type qlora trains adapters on a 4-bit base",
        "load_in_8bit": "--train_type qlora --n_bits 8 trains adapters on an 8-bit base",
        "quantization_bit": "--train_type qlora --n_bits N",
        "bf16 fp16 fp32 dtype torch_dtype": f"--precision bf16, fp16 or fp32; {_AUTO_PRECISION}",
        "use_dora": "--train_type dora",
        "use_peft full_finetuning": "--train_type lora is the default, --train_type full trains all weights",
        "num_layers": "num_layers in a file passed with --mlx_config, or --layers_to_transform with the numbers of the layers",
        "datasets dataset_dir data_path train_file train_data": "--dataset FILE, FOLDER or HUB_ID",
        "val_set_size val_size test_size": "--eval_fraction F holds out a fraction, --eval_samples N at most N examples; --eval_dataset "
        "FILE specifies them",
        "completion_only_loss assistant_only_loss train_on_responses_only": "loss is computed on answers only; --train_on_prompt "
        "computes it on prompts too",
        "template": "--chat_template with a name or a Jinja file; by default the model's template is used",
        "trust_remote_code": "code from a model's repository is never run",
        "lr_schedule": "--lr_scheduler with --warmup_steps and --cosine_min_lr_ratio",
        "optimizer_config optim_args": "--optimizer, --lr, --wd, --adam_beta1, --adam_beta2 and --adam_epsilon",
        "shuffle data_seed": "the data is shuffled by --seed",
        "attn_implementation flash_attn": "--use_flash_attention true or false; by default it is used wherever available",
        "early_stopping_patience": "--eval_steps N with --early_stopping N, the evaluations without improvement",
        "load_best_model_at_end": "--eval_steps N --result best saves the weights of the best evaluation",
        "eval_strategy evaluation_strategy": "--eval_steps N, or --skip_eval for none",
        "save_strategy": "--save_steps N or --save_minutes N",
        "resume_adapter_file": "--base_adapter FOLDER to start from an adapter (crosstune convert ADAPTER --to peft converts "
        "one of mlx-lm), or --resume to continue a run of crosstune",
        "push_to_hub hub_model_id": "crosstune push RUN publishes the result",
        "token hf_token hub_token use_auth_token api_key": _LOGIN,
        "use_wandb wandb": "--log_to wandb",
        "wandb_api_key": "wandb login, or WANDB_API_KEY in the environment",
        "cuda_graphs": "--torch_compile and --kernels fast save time",
        "rl rlhf_type": "--recipe rl --rl_loss grpo, ...; --recipe preference --preference_loss dpo, ipo, orpo, simpo, kto, ...",
    }
)
"""Their name -> the replacement. `crosstune import` knows all keys of their configuration files."""

_OFF = """
load_in_4bit load_in_8bit quantization_bit use_dora deepspeed fsdp fsdp_config neftune_noise_alpha noisy_embedding_alpha
trust_remote_code push_to_hub use_peft full_finetuning use_wandb use_cpu no_cuda cpu datasets reward_model cuda_graphs
"""
OFF_BY_DEFAULT = frozenset(_OFF.split())
"""Names to ignore if their value is false, 0 or empty, as often in other tools' configurations."""

SECTIONS: Mapping[str, Mapping[str, str]] = _by_name(
    {
        "model": {"name": "model_name", "path": "model_name"},
        "data": _by_name({"name path train": "dataset", "eval": "eval_dataset", "format": "dataset_format"}),
        "dataset": _by_name({"name path source": "dataset", "format": "dataset_format"}),
        "method": {"name": "train_type", "type": "train_type"},
        "lora peft lora_parameters lora_config": _by_name(
            {
                "r rank": "lora_rank",
                "alpha": "lora_alpha",
                "dropout": "lora_dropout",
                "keys targets": "lora_target_modules",
            }
        ),
        "quantization": {"bits": "n_bits", "backend": "quantization_backend", "type": "quant_type"},
        "training train trainer": {"epochs": "num_epochs", "steps": "max_steps"},
        "optimizer optim": _by_name(
            {
                "name type": "optimizer",
                "beta1": "adam_beta1",
                "beta2": "adam_beta2",
                "eps epsilon": "adam_epsilon",
            }
        ),
        "scheduler lr_scheduler": {"name": "lr_scheduler", "type": "lr_scheduler"},
        "hardware": {"device": "backend"},
        "output": {"dir": "output_dir"},
        "checkpoint": {"steps": "save_steps"},
        "evaluation eval": {"steps": "eval_steps", "samples": "eval_samples", "dataset": "eval_dataset"},
        "logging": {"steps": "log_every_n_steps"},
        "profiler": {"warmup_steps": "profiler_warmup_steps"},
        "tokenizer training_args distributed run profiling": {},
    }
)
"""Section of a YAML file -> its short names of options; full names are accepted in every section."""
