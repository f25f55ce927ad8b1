"""The keys of LLaMA-Factory (August 2026)."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.importing import dataset_values, values
from crosstune.importing.huggingface_keys import PEFT, TRANSFORMERS
from crosstune.importing.rules import (
    DEVICES,
    EXPERTS,
    OPTIMIZERS,
    OWN_LOSS,
    PICTURES,
    RL,
    SPEED,
    TOKENS,
    Rule,
    by_name,
    switch,
)
from crosstune.importing.values import Missing, Nothing

FACTORY_ONLY: Mapping[str, Rule] = by_name(
    {
        "adapter_name_or_path": "base_adapter",
        "stage": {"sft": {}, "pt": {"dataset_format": "text"}, "dpo": {"recipe": "preference"},
                  "kto": {"recipe": "preference", "preference_loss": "kto"},
                  "rm": {"recipe": "judge", "head": "scalar"}},
        "finetuning_type": {"lora": {"train_type": "lora"}, "full": {"train_type": "full"}},
        "lora_rank": "lora_rank",
        "lora_target": values.targets,
        "additional_target": "modules_to_save",
        "loraplus_lr_ratio": "loraplus_lr_ratio",
        "pissa_init": switch(init_lora="pissa"),
        "pissa_iter pissa_convert": SPEED,
        "create_new_adapter": {"false": {}},
        "use_llama_pro": switch(train_type="llama_pro"),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules": values.freeze,
        "quantization_bit": values.quantization_bit,
        "quantization_method": {"bnb": {"quantization_backend": "bnb"}, "hqq": {"quantization_backend": "hqq"},
                                "bitsandbytes": {"quantization_backend": "bnb"}},
        "quantization_type": "quant_type",
        "double_quantization": "double_quant",
        "quantization_device_map": SPEED,
        "dataset": dataset_values.factory_data("dataset"),
        "eval_dataset": dataset_values.factory_data("eval_dataset"),
        "dataset_dir": values.consumed("dataset"),
        "media_dir image_* video_* audio_* freeze_vision_tower freeze_multi_modal_projector": PICTURES,
        "template": dataset_values.factory_template,
        "default_system enable_thinking": Missing("put it into the data or the template (--chat_template FILE)"),
        "cutoff_len model_max_length": "context_length",
        "train_on_prompt": "train_on_prompt",
        "mask_history": {"false": {}},
        "neat_packing packing": "packing",
        "block_diag_attn": {"true": {}},
        "max_samples": "dataset_samples",
        "val_size": dataset_values.held_out,
        "eval_on_each_dataset overwrite_cache preprocessing_num_workers preprocessing_batch_size buffer_size": SPEED,
        "tokenized_path streaming data_shared_file_system use_fast_tokenizer low_cpu_mem_usage use_kv_cache": SPEED,
        "mix_strategy": {"concat": {}},
        "interleave_probs": Missing("list a file more than once in --dataset to weight it"),
        "ignore_pad_token_for_loss disable_shuffling": {"true": {}, "false": {}},
        "flash_attn": {"auto": {}, "fa2": {"use_flash_attention": True}, "sdpa": {"use_flash_attention": False},
                       "disabled": {"use_flash_attention": False}},
        "pure_bf16": switch(precision="bf16"),
        "disable_gradient_checkpointing": {"true": {"use_gradient_checkpointing": False}, "false": {}},
        "use_reentrant_gc use_unsloth_gc upcast_layernorm upcast_lmhead_output": SPEED,
        "enable_liger_kernel use_unsloth use_v1_kernels": OWN_LOSS,
        "add_tokens": "add_tokens",
        "add_special_tokens": "add_tokens",
        "resize_vocab": Nothing("--add_tokens resizes the embeddings"),
        "new_special_tokens_config split_special_tokens": TOKENS,
        "rope_scaling shift_attn mixture_of_depths": values.off,
        "pref_beta": "beta",
        "pref_loss": values.trl_loss,
        "pref_ftx": "sft_weight",
        "dpo_label_smoothing": "label_smoothing",
        "kto_chosen_weight": "desirable_weight",
        "kto_rejected_weight": "undesirable_weight",
        "simpo_gamma": "simpo_gamma",
        "pref_bco_weight ld_alpha": values.off,
        "ref_model ref_model_adapters ref_model_quantization_bit": Missing(
            "the reference is the model before the training; start from an adapter with --base_adapter"),
        "reward_model reward_model_adapters ppo_target ppo_epochs ppo_score_norm ppo_buffer_size": RL,
        "use_galore use_apollo use_badam use_muon use_adam_mini": values.off,
        "galore_rank galore_target galore_scale apollo_rank apollo_target badam_mode": OPTIMIZERS,
        "use_dft_loss use_asft_loss use_eaft_loss": values.off,
        "early_stopping_steps": "early_stopping",
        "compute_accuracy plot_loss include_effective_tokens_per_second print_param_status": Nothing("the report shows it"),
        "swanlab_* use_swanlab": Missing("use --log_to wandb, weave, trackio or tensorboard"),
        "trust_remote_code": values.no_foreign_code,
        "cache_dir offload_folder hf_hub_token ms_hub_token om_hub_token model_revision": Nothing(
            "set HF_HOME and HF_TOKEN in the environment"),
        "infer_backend infer_dtype do_sample temperature top_p top_k max_new_tokens num_beams": Nothing(
            "these options belong to generation: crosstune generate"),
        "predict_with_generate eval_num_beams repetition_penalty length_penalty": Missing(
            "after the run: crosstune generate RUN --prompts FILE"),
        "export_dir export_size export_device export_quantization_bit export_legacy_format export_hub_model_id": Missing(
            "after the run: crosstune merge or crosstune export"),
        "ray_num_workers ray_init_kwargs master_addr master_port": DEVICES,
        "tensor_model_parallel_size pipeline_model_parallel_size sequence_parallel context_parallel_size": values.only_one,
        "moe_aux_loss_coef": EXPERTS,
        "enable_torch_profiler": switch(profile=True),
        "fp8": switch(base_precision="fp8"),
        "fp8_backend": SPEED,
    }
)  # fmt: skip

FACTORY = {**TRANSFORMERS, **PEFT, **FACTORY_ONLY}
