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
    "finetuning_type": (
        "train_type",
        {"lora": "lora", "full": "full"},
        "--train_type; to train only a few layers, use llama_pro",
    ),
    "fine_tune_type": ("train_type", {"lora": "lora", "dora": "dora", "full": "full"}, "--train_type"),
    "init_lora_weights": (
        "init_lora",
        {"true": "default", "orthogonal": "orthogonal", "pissa": "pissa"},
        "--init_lora default, orthogonal, pissa or loftq",
    ),
    "peft_init_lora_weights": (
        "init_lora",
        {"true": "default", "orthogonal": "orthogonal", "pissa": "pissa"},
        "--init_lora default, orthogonal, pissa or loftq",
    ),
    "pissa_init": (
        "init_lora",
        {"true": "pissa", "false": "default"},
        "--init_lora default, orthogonal, pissa or loftq",
    ),
    "precompute_ref_log_probs": (
        "reference",
        {"true": "precomputed", "false": "online"},
        "--reference online or precomputed",
    ),
    **dict.fromkeys(
        ("pref_loss", "dpo_loss_type"),
        (
            "preference_loss",
            PREFERENCE_LOSSES,
            "--preference_loss; a list with weights as in dpo:0.8,bco:0.2,sft:1",
        ),
    ),
    "stage": (
        "head",
        {"rm": "scalar"},
        "crosstune train for sft and pt, --recipe preference for dpo and kto; `crosstune judge train --head scalar` trains "
        "reward models",
    ),
    "reward_model": ("head", {"true": "scalar"}, "`crosstune judge train --head scalar`"),
    # TRL's default, which also leaves rows with messages alone.
    "dataset_text_field": ("dataset_format", {"text": "auto"}, "--columns COLUMN=text"),
    "adapter": ("train_type", {"lora": "lora", "qlora": "qlora"}, "--train_type, or --base_adapter FOLDER"),
}
"""Their name -> (option, their value -> our value, advice for any other value, which replaces COLUMN in it)."""

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
_BEST = "--eval_steps N --result best saves the weights of the best evaluation"
_TEMPLATE = "--chat_template with a name or a Jinja file; by default the model's template is used"
_MASKING = "loss is computed on answers only; --train_on_prompt computes it on prompts too"

DIFFERENT: Mapping[str, str] = _by_name(
    {
        "steps": "--max_steps N",
        "gpus num_gpus n_gpus": "--world_size N; CUDA_VISIBLE_DEVICES chooses the devices",
        "gpu cuda": "--backend cuda; CUDA_VISIBLE_DEVICES chooses the devices",
        "r": "--lora_rank N",
        "model_path model_dir": "--model_name takes a folder, a .gguf file, a hub id or a bundled name",
        "data_path train_file train_data": "--dataset takes a file, a folder, a hub id or a known name",
        "grad_accum": "--gradient_accumulation_steps N",
        "bs": "--batch_size N",
        "wandb": "--log_to wandb",
        "out": "--output_dir for the parent of the run folders, and --name for the run",
        "eval_every": "--eval_steps N",
        "load_in_4bit": "--train_type qlora trains adapters on a 4-bit base",
        "load_in_8bit": "--train_type qlora --n_bits 8 trains adapters on an 8-bit base",
        "load_in_16bit": f"--precision bf16 or fp16; {_AUTO_PRECISION}",
        "quantization_bit": "--train_type qlora --n_bits N",
        "quantization_method": "--train_type qlora --quantization_backend NAME",
        "bnb_4bit_quant_type": "--train_type qlora --quant_type nf4 or fp4",
        "bnb_4bit_use_double_quant": "--double_quant true or false",
        "bnb_4bit_compute_dtype tf32": f"--precision; {_AUTO_PRECISION}",
        "bf16": f"--precision bf16; {_AUTO_PRECISION}",
        "fp16": f"--precision fp16 or fp16_autocast; {_AUTO_PRECISION}",
        "pure_bf16": f"--precision bf16 (trained weights stay in fp32); {_AUTO_PRECISION}",
        "fp32": f"--precision fp32; {_AUTO_PRECISION}",
        "dtype torch_dtype": f"--precision bf16, fp16 or fp32; {_AUTO_PRECISION}",
        "use_dora": "--train_type dora",
        "use_peft": "--train_type lora is the default, --train_type full trains all weights",
        "full_finetuning": "--train_type full",
        "do_train train": "crosstune train always trains",
        "test": "--eval_dataset specifies held-out data",
        "do_eval": "evaluation is on by default; --skip_eval turns it off",
        "do_predict": "crosstune generate RUN answers prompts",
        "num_layers lora_layers": "num_layers in a file passed with --mlx_config, or --layers_to_transform with the numbers of the layers",
        "lora_attn_modules apply_lora_to_mlp apply_lora_to_output": "--lora_target_modules with the names of all layers",
        "loftq_config": "--train_type qlora --init_lora loftq, in one iteration",
        "bias lora_bias": "biases are not trained with adapters",
        "datasets": "--dataset FILE, FOLDER or HUB_ID",
        "pretraining_dataset": "--dataset FILE, FOLDER or HUB_ID with --dataset_format text; --packing fills rows",
        "dataset_dir": "--dataset FOLDER or FILE",
        "dataset_type": "--dataset_format; auto detects it from the columns",
        "dataset_split": "--dataset reads the training split; --dataset_samples N uses the first N examples",
        "dataset_num_proc preprocessing_num_workers": "crosstune tokenizes in one pass; there is nothing to set",
        "dataset_prepared_path": "crosstune tokenizes in one pass; there is nothing to set",
        "dataloader_num_workers": "batches are prepared ahead in the background; there is nothing to set",
        "val_set_size val_size test_size": "--eval_fraction F holds out a fraction, --eval_samples N at most N examples; --eval_dataset "
        "FILE specifies them",
        "val_batches test_batches": "--eval_samples N, the number of examples in an evaluation",
        "max_eval_samples": "--eval_samples N",
        "max_train_samples limit": "--dataset_samples N",
        "pad_to_sequence_len": "batches are padded to their longest row; there is nothing to set",
        "group_by_length length_column_name": "--packing fills rows with multiple examples",
        "eval_packing": "evaluation rows are never packed",
        "completion_only_loss assistant_only_loss response_template": _MASKING,
        "instruction_template train_on_responses_only roles_to_train": _MASKING,
        "template chat_template_path": _TEMPLATE,
        "tokenizer_type": "the tokenizer in the model's folder is used; --tokenizer overrides it",
        "special_tokens": "the special tokens of the model's tokenizer are used",
        "trust_remote_code": "code from a model's repository is never run",
        "train_batch_size global_batch_size": "--batch_size rows on each device times --gradient_accumulation_steps",
        "auto_find_batch_size": "--batch_size auto",
        "max_steps_per_epoch": "--max_steps N for the whole run",
        "lr_schedule lr_scheduler_kwargs": "--lr_scheduler with --warmup_steps and --cosine_min_lr_ratio",
        "warmup": "--warmup_steps N or --warmup_ratio FRACTION",
        "min_lr cosine_min_lr": "--cosine_min_lr_ratio, the final learning rate as a fraction of the peak",
        "embedding_learning_rate": "all trained weights use --lr; --loraplus_lr_ratio sets a separate rate for B",
        "optimizer_config optim_args": "--optimizer, --lr, --wd, --adam_beta1, --adam_beta2 and --adam_epsilon",
        "adam_epsilon2 adam_beta3": "--adam_epsilon, --adam_beta1 and --adam_beta2",
        "label_smoothing_factor": "crosstune computes the plain cross-entropy",
        "early_stopping_patience": "--eval_steps N with --early_stopping N, the evaluations without improvement",
        "load_best_model_at_end": _BEST,
        "metric_for_best_model": "--eval_metric; --result best uses the evaluation loss",
        "data_seed": "--seed, including the data order",
        "shuffle": "the data is shuffled by --seed",
        "gradient_checkpointing_kwargs": "--reentrant_checkpointing true or false",
        "attn_implementation flash_attn xformers_attention": "--use_flash_attention true or false; by default it is used wherever "
        "available",
        "sdp_attention": "--use_flash_attention false; attention is torch's scaled_dot_product_attention",
        "use_liger_kernel enable_liger_kernel liger_kernel": "crosstune has its own memory-saving loss; there is nothing to set",
        "use_unsloth unsloth": "crosstune has its own fast layers (--kernels)",
        "compile": "--torch_compile true or false; compile in a file passed with --mlx_config, for the MLX engine",
        "device device_map": "--backend cuda, rocm, xpu, mps, mlx or cpu; auto uses the first available",
        "use_cpu no_cuda cpu": "--backend cpu",
        "use_mps_device": "--backend mps",
        "deepspeed fsdp fsdp_config num_gpus nproc_per_node": _SEVERAL,
        "ddp": "--world_size N --sharding_strategy ddp; by default crosstune train starts one process per device",
        "ddp_timeout ddp_find_unused_parameters": _SEVERAL,
        "local_rank": "MLX processes are started with mlx.launch; --world_size is their number",
        "overwrite_output_dir": "--overwrite renames an existing run of this name; nothing is deleted",
        "adapter_path": "--output_dir and --name for the result, --base_adapter FOLDER for an adapter to start from",
        "resume_adapter_file": "--base_adapter FOLDER to start from an adapter (crosstune convert ADAPTER --to peft converts "
        "one of mlx-lm), or --resume to continue a run of crosstune",
        "checkpointer": "--model_name for the model, --output_dir and --name for the result",
        "logging_dir": "--output_dir and --name; every step is in metrics.jsonl of the run folder",
        "use_wandb": "--log_to wandb",
        "wandb_run_id wandb_name": "--name sets the run name",
        "plot_loss": "crosstune report RUN draws the loss",
        "eval_strategy evaluation_strategy": "--eval_steps N, or --skip_eval for none",
        "evals_per_epoch": "--eval_steps N",
        "save_strategy saves_per_epoch": "--save_steps N or --save_minutes N",
        "logging_strategy": "--log_every_n_steps N",
        "save_safetensors": "results are always safetensors",
        "save_only_model": "a checkpoint always contains the optimizer state, the result never does",
        "push_to_hub hub_model_id hub_strategy": "upload the result yourself: hf upload REPOSITORY RUN/adapter",
        "token hf_token hub_token use_auth_token api_key": _LOGIN,
        "wandb_api_key": "wandb login, or WANDB_API_KEY in the environment",
        "rl rlhf_type": "--recipe rl --rl_loss grpo, ...; --recipe preference --preference_loss dpo, ipo, orpo, simpo, kto, ...; --recipe judge --head scalar trains reward "
        "models",
        "kd_trainer kd_loss": "--recipe distill with --teacher and --distill_loss",
        "kd_ratio kd_alpha kd_ce_alpha": "--ce_weight: the loss is the divergence plus this weight times the cross entropy",
        "clear_cache_threshold": "cache_limit_gb in a file passed with --mlx_config, or --low_memory",
    }
)
"""Their name -> the replacement."""

REMOVED: Mapping[str, str] = {
    "cuda_graphs": "remove it; --torch_compile and --kernels fast save time",
}
"""Option of an earlier version -> advice."""

_OFF = """
load_in_4bit load_in_8bit quantization_bit use_dora deepspeed fsdp fsdp_config neftune_noise_alpha
noisy_embedding_alpha group_by_length trust_remote_code push_to_hub use_peft full_finetuning
do_train do_predict loftq_config use_wandb wandb_run_id
wandb_name xformers_attention use_liger_kernel liger_kernel use_unsloth unsloth label_smoothing_factor plot_loss use_cpu
no_cuda cpu ddp pretraining_dataset datasets tf32 special_tokens reward_model
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
