"""Configurations of other trainers."""

from __future__ import annotations

import json
from pathlib import Path

AXOLOTL = """
base_model: my/model
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: turns
val_set_size: 0.05
adapter: qlora
load_in_4bit: true
sequence_len: 1024
sample_packing: true
lora_r: 32
lora_alpha: 16
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 0.0003
bf16: auto
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 2
weight_decay: 0.0
max_grad_norm: 0.3
liger_rope: true
special_tokens:
  pad_token: <pad>
"""
FACTORY = """
model_name_or_path: my/model
stage: dpo
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.2
pref_loss: orpo
dataset: pairs
dataset_dir: data
template: llama3
cutoff_len: 512
per_device_train_batch_size: 1
learning_rate: 5.0e-6
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
val_size: 0.1
eval_strategy: steps
eval_steps: 50
deepspeed: examples/deepspeed/ds_z3_config.json
"""
MLX = """
model: my/model
fine_tune_type: dora
data: chats.jsonl
iters: 100
batch_size: 2
num_layers: -1
learning_rate: 1e-4
mask_prompt: true
lora_parameters: {rank: 4, scale: 10.0, dropout: 0.1, keys: [self_attn.q_proj]}
lr_schedule: {name: cosine_decay, warmup: 10, arguments: [1e-4, 100, 1e-5]}
"""
TORCHTUNE = """
output_dir: out
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: false
  lora_rank: 8
  lora_alpha: 16
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: "${checkpointer.checkpoint_dir}/tokenizer.model", max_seq_len: 256}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: my/model, output_dir: "${output_dir}"}
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 3e-4, weight_decay: 0.1}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
batch_size: 4
epochs: 2
clip_grad_norm: null
dtype: bf16
device: cpu
"""
TUNE_CHATS = (
    TORCHTUNE.replace(
        "{_component_: torchtune.datasets.alpaca_dataset, packed: true}",
        "{_component_: torchtune.datasets.chat_dataset, source: org/chats, conversation_column: turns, conversation_style: sharegpt}",
    )
    .replace("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss")
    .replace("device: cpu", "device: cuda")
)
TRL = r"""#!/bin/sh
trl sft --model_name_or_path my/model --dataset_name chats.jsonl --learning_rate 2e-4 --max_length 512 \
  --packing --use_peft --lora_r 32 --no_remove_unused_columns --optim adamw_torch --report_to wandb tensorboard
"""
DPO = """
from trl import DPOConfig, DPOTrainer
from peft import LoraConfig
model = AutoModelForCausalLM.from_pretrained("my/model")
data = load_dataset("json", data_files={"train": "pairs.jsonl", "test": "held.jsonl"})
args = DPOConfig(beta=0.2, max_length=512)
trainer = DPOTrainer(model, args=args, train_dataset=data["train"], peft_config=LoraConfig(task_type="CAUSAL_LM"))
"""
SCALED = "micro_batch_size: 2\nrope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768"
UNSLOTH = [
    "!pip install unsloth\n",
    "max_seq_length = 256\n",
    "model, tokenizer = FastLanguageModel.from_pretrained('my/model', max_seq_length=max_seq_length, load_in_4bit=True)\n",
    "model = FastLanguageModel.get_peft_model(model, r=16, lora_alpha=16, random_state=3407, loftq_config=None)\n",
    "data = load_dataset('org/chats', split='train')\n",
    "args = SFTConfig(max_steps=60, fp16=not torch.cuda.is_bf16_supported(), optim='adamw_8bit')\n",
]  # fmt: skip


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def notebook(code: list[str]) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": code}]})
