"""The keys of transformers 5, PEFT, TRL 1.16 and Unsloth."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.importing import dataset_values, values
from crosstune.importing.rules import (
    DEVICES,
    EXPERTS,
    HUB,
    OPTIMIZERS,
    OWN_LOSS,
    PICTURES,
    RL,
    SPEED,
    TOKENS,
    WORDS,
    Rule,
    by_name,
    switch,
)
from crosstune.importing.values import Missing, Nothing

TRANSFORMERS: Mapping[str, Rule] = by_name(
    {
        "model_name_or_path pretrained_model_name_or_path": "model_name",
        "output_dir": "output_dir",
        "run_name": "name",
        "per_device_train_batch_size": "batch_size",
        "per_device_eval_batch_size": "eval_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "learning_rate": "lr",
        "weight_decay": "wd",
        "adam_beta1": "adam_beta1",
        "adam_beta2": "adam_beta2",
        "adam_epsilon": "adam_epsilon",
        "max_grad_norm": values.clipping,
        "num_train_epochs": values.epochs,
        "max_steps": values.max_steps,
        "lr_scheduler_type": values.schedule,
        "lr_scheduler_kwargs": values.schedule_options,
        "warmup_steps": values.warmup,
        "warmup_ratio": values.warmup_ratio,
        "optim": values.optimizer,
        "seed": "seed",
        "neftune_noise_alpha": "neftune_alpha",
        "logging_steps": values.logging_steps,
        "eval_strategy evaluation_strategy": values.eval_strategy,
        "eval_steps": values.at_steps("eval_steps"),
        "save_strategy": values.save_strategy,
        "save_steps": values.at_steps("save_steps"),
        "save_total_limit": "keep_last_n",
        "load_best_model_at_end": switch(result="best"),
        "metric_for_best_model": {"loss": {}, "eval_loss": {}},
        "greater_is_better": {"false": {}},
        "gradient_checkpointing": "use_gradient_checkpointing",
        "gradient_checkpointing_kwargs": values.recomputation,
        "torch_compile": "torch_compile",
        "bf16": switch(precision="bf16_autocast"),
        "fp16": switch(precision="fp16_autocast"),
        "dtype torch_dtype": values.weight_dtype,
        "report_to": values.report_to,
        "project": "project_name",
        "resume_from_checkpoint": values.resume,
        "use_cpu no_cuda": switch(backend="cpu"),
        "use_mps_device": switch(backend="mps"),
        "auto_find_batch_size": switch(batch_size="auto"),
        "fsdp": values.fsdp,
        "fsdp_config fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params accelerator_config parallelism_config": DEVICES,
        "deepspeed deepspeed_plugin": values.deepspeed,
        "ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout": DEVICES,
        "local_rank average_tokens_across_devices": DEVICES,
        "tf32 torch_compile_backend torch_compile_mode torch_empty_cache_steps use_cache full_determinism": SPEED,
        "dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers": SPEED,
        "dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor": SPEED,
        "eval_accumulation_steps eval_do_concat_batches eval_use_gather_object batch_eval_metrics": SPEED,
        "bf16_full_eval fp16_full_eval prediction_loss_only remove_unused_columns skip_memory_metrics": SPEED,
        "use_liger_kernel liger_kernel_config": OWN_LOSS,
        "debug disable_tqdm log_level log_level_replica log_on_each_node logging_dir logging_first_step": WORDS,
        "logging_nan_inf_filter logging_strategy include_num_input_tokens_seen include_for_metrics": WORDS,
        "label_names trackio_bucket_id trackio_space_id trackio_static_space_id": WORDS,
        "do_train train_sampling_strategy": Nothing("crosstune train trains on the data shuffled by --seed"),
        "do_eval": Nothing("evaluation follows eval_strategy"),
        "do_predict": Missing("after the run: crosstune generate RUN --prompts FILE"),
        "data_seed": Nothing("--seed sets the data order too"),
        "save_safetensors save_on_each_node save_only_model enable_jit_checkpoint": Nothing(
            "results are safetensors; a checkpoint always contains the optimizer state"),
        "restore_callback_states_from_checkpoint ignore_data_skip": Nothing("a resumed run continues exactly"),
        "overwrite_output_dir": switch(overwrite=True),
        "eval_delay eval_on_start": Nothing("crosstune evaluates before the first step and after the last"),
        "label_smoothing_factor": Missing("crosstune computes the plain cross entropy"),
        "optim_args optim_target_modules": OPTIMIZERS,
        "group_by_length length_column_name": Nothing("--packing fills rows with short examples instead"),
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_revision hub_always_push": HUB,
        "hub_token token hf_token": Missing("log in with `hf auth login`; a token in a file would be saved with the run"),
    }
)  # fmt: skip
"""The keys of transformers' TrainingArguments."""

PEFT: Mapping[str, Rule] = by_name(
    {
        "r lora_r": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "target_modules lora_target_modules": values.targets,
        "modules_to_save lora_modules_to_save": "modules_to_save",
        "layers_to_transform": "layers_to_transform",
        "use_rslora": "use_rslora",
        "use_dora": switch(train_type="dora"),
        "init_lora_weights": values.init_lora,
        "bias": {"none": {}},
        "task_type lora_task_type inference_mode fan_in_fan_out": SPEED,
        "loftq_config": values.loftq,
        "rank_pattern alpha_pattern layers_pattern layer_replication": Missing("all adapters have one rank"),
        "target_parameters lora_target_parameters": EXPERTS,
        "trainable_token_indices": TOKENS,
    }
)

QUANTIZED: Mapping[str, Rule] = by_name(
    {
        "load_in_4bit": values.bits(4),
        "load_in_8bit": values.bits(8),
        "bnb_4bit_quant_type": "quant_type",
        "bnb_4bit_use_double_quant use_bnb_nested_quant": "double_quant",
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage": SPEED,
        "llm_int8_threshold llm_int8_skip_modules": SPEED,
    }
)

TRL_ONLY: Mapping[str, Rule] = by_name(
    {
        "dataset_name dataset": "dataset",
        "dataset_config dataset_train_split dataset_streaming": dataset_values.dataset_part,
        "dataset_test_split": Nothing("the held-out split is found by its name, or set with --eval_dataset"),
        "dataset_text_field": dataset_values.text_field,
        "max_length max_seq_length": values.context,
        "truncation_mode": {"keep_start": {"truncation": "cut"}},
        "packing": "packing",
        "packing_strategy": {"bfd": {}, "ffd": {}, "wrapped": {}},
        "eval_packing padding_free pad_to_multiple_of dataset_num_proc shuffle_dataset": SPEED,
        "assistant_only_loss completion_only_loss": {"true": {}, "false": {}, "none": {}},
        "activation_offloading": values.offloaded,
        "chat_template_path": "chat_template",
        "use_peft": {"true": {"train_type": "lora"}, "false": {"train_type": "full"}},
        "attn_implementation": values.attention,
        "model_revision": {"main": {}},
        "model_init_kwargs dataset_kwargs": values.only_empty,
        "trust_remote_code": values.no_foreign_code,
        "loss_type": values.trl_loss,
        "loss_weights": values.consumed("loss_type"),
        "beta": "beta",
        "label_smoothing": "label_smoothing",
        "desirable_weight": "desirable_weight",
        "undesirable_weight": "undesirable_weight",
        "simpo_gamma": "simpo_gamma",
        "cpo_alpha rpo_alpha": "sft_weight",
        "precompute_ref_log_probs": {"true": {"reference": "precomputed"}, "false": {}},
        "precompute_ref_batch_size disable_dropout": SPEED,
        "center_rewards_coefficient": "center_rewards",
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps": values.off_switch("sync_ref_model"),
        "f_divergence_type": {"reverse_kl": {}},
        "f_alpha_divergence_coef discopop_tau use_weighting ld_alpha": Missing("use a loss of --preference_loss"),
        "router_aux_loss_coef": EXPERTS,
        "eos_token pad_token": TOKENS,
        "ignore_bias_buffers": SPEED,
        "num_generations max_completion_length use_vllm reward_funcs epsilon epsilon_high scale_rewards": RL,
    }
)  # fmt: skip

TRAINER: Mapping[str, Rule] = by_name(
    {
        "trainer": values.trl_trainer,
        "peft_config": values.peft_config,
        "load_dataset": dataset_values.load_dataset,
        "config": Missing("import that file, with --recipe preference if its trainer is DPO"),
        "accelerate_config num_processes num_machines machine_rank main_process_ip main_process_port": DEVICES,
    }
)  # fmt: skip
"""Read from the subcommand, the script's name or the code."""

TRL = {**TRANSFORMERS, **PEFT, **QUANTIZED, **TRL_ONLY, **TRAINER}

UNSLOTH: Mapping[str, Rule] = {
    **TRL,
    **by_name(
        {
            "model_name": "model_name",
            "load_in_4bit": values.unsloth_bits,
            "dtype": values.weight_dtype,
            "full_finetuning": switch(train_type="full"),
            "load_in_16bit fast_inference gpu_memory_utilization max_lora_rank": SPEED,
            "use_gradient_checkpointing": {"true": {"use_gradient_checkpointing": True}, "false": {},
                                           "unsloth": {"use_gradient_checkpointing": True}},
            "random_state": "seed",
            "instruction_part response_part": Nothing("loss is computed on the assistant's tokens"),
            "embedding_learning_rate": Missing("all trained weights use --lr"),
            "chat_template": "chat_template",
            "finetune_vision_layers": PICTURES,
            "finetune_language_layers finetune_attention_modules finetune_mlp_modules": {"true": {}},
            "num_proc map_eos_token": SPEED,
        }
    ),
}  # fmt: skip
