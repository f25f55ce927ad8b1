"""The trainers whose configurations can be imported: their keys (`keys.yaml`) and the defaults that differ from crosstune's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

import yaml

from crosstune.importing import dataset_values, torchtune_values, values
from crosstune.importing.values import Convert, Missing, Nothing, Options


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A trainer: its keys, the defaults that differ from crosstune's, and the keys that identify its files."""

    title: str
    tables: str
    """Tables of `keys.yaml`."""
    defaults: Options
    marks: frozenset[str]
    """Keys that only this trainer has."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Recipe -> default learning rate, if it differs from `defaults`."""
    remark: str = ""
    """A difference of supervised fine-tuning that no key shows."""
    sections: frozenset[str] = field(default_factory=frozenset)
    """Sections of options; a nested mapping under any other key is a value."""

    @property
    def rules(self) -> Mapping[str, Rule]:
        return load_rules(self.tables)


HF_DEFAULTS = {
    "lr": 5e-5, "wd": 0.0, "lr_scheduler": "linear", "num_epochs": 3, "cosine_min_lr_ratio": 0.0, "skip_eval": True,
    "warmup_steps": 0, "batch_size": 8, "gradient_accumulation_steps": 1, "grad_norm": 1.0, "lora_dropout": 0.0,
    "lora_target_modules": "all", "beta": 0.1,
}  # fmt: skip
"""Defaults of transformers; a recipe's preset may differ from them where crosstune's default does not."""
LORA_CONFIG = {"lora_rank": 8, "lora_alpha": 8, "lora_dropout": 0.0, "lora_target_modules": "default"}
"""The defaults of PEFT's LoraConfig in Python code."""

_ALL_TOKENS = (
    "TRL computes the loss on all tokens of a conversation unless assistant_only_loss or train_on_responses_only is used; "
    "crosstune on the assistant's, or on all with --train_on_prompt"
)

TOOLS: Mapping[str, Tool] = {
    "axolotl": Tool(
        title="axolotl",
        tables="transformers peft bitsandbytes trl axolotl",
        defaults={"lr_scheduler": "cosine", "wd": 0.0, "num_epochs": 1, "cosine_min_lr_ratio": 0.0, "skip_eval": True,
                  "optimizer": "fused_adamw", "context_length": 512, "truncation": "drop", "train_type": "full", "warmup_ratio": 0.03,
                  "beta": 0.1, "sft_weight": 1.0},
        marks=frozenset({"base_model", "micro_batch_size", "sequence_len", "datasets"}),
        sections=frozenset({"liger"}),
    ),
    "llamafactory": Tool(
        title="LLaMA-Factory",
        tables="transformers peft llamafactory",
        defaults=HF_DEFAULTS | {"lora_rank": 8, "lora_alpha": values.TWICE_THE_RANK, "truncation": "cut"},
        marks=frozenset({"stage", "finetuning_type", "cutoff_len", "lora_target", "template", "dataset_dir"}),
    ),
    "trl": Tool(
        title="TRL",
        tables="transformers peft bitsandbytes trl trainer",
        defaults=HF_DEFAULTS | {"lr": 2e-5, "context_length": 1024, "truncation": "cut", "train_type": "full",
                                 "use_gradient_checkpointing": True, "optimizer": "fused_adamw",
                                 "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.05,
                                 "lora_target_modules": "default", "sft_weight": 1.0},
        rates={"preference": 1e-6, "judge": 1e-4},
        remark=_ALL_TOKENS,
        marks=frozenset({"trainer", "dataset_name", "use_peft", "lora_r", "dataset_text_field", "max_length"}),
    ),
    "unsloth": Tool(
        title="Unsloth",
        tables="transformers peft bitsandbytes trl trainer unsloth",
        defaults=HF_DEFAULTS | {"truncation": "cut", "lora_rank": 16, "lora_alpha": 16, "train_type": "qlora",
                                "batch_size": 4, "gradient_accumulation_steps": 2, "wd": 0.01, "seed": 3407,
                                "optimizer": "adamw_8bit", "warmup_steps": None, "warmup_ratio": 0.1,
                                "sft_weight": 1.0},
        remark=_ALL_TOKENS,
        marks=frozenset({"random_state", "max_seq_length", "model_name"}),
    ),
    "mlx-lm": Tool(
        title="mlx-lm",
        tables="mlx-lm",
        defaults={"batch_size": 4, "max_steps": 1000, "lr": 1e-5, "wd": 0.0, "lr_scheduler": "constant", "lora_rank": 8,
                  "lora_alpha": values.SCALE_OF_20, "seed": 0, "apply_gradient_clipping": False, "truncation": "cut",
                  "train_on_prompt": True, "backend": "mlx", "eval_steps": 200, "save_steps": 100,
                  "layers_to_transform": values.LAST_16},
        remark="mlx-lm adapts the last 16 layers unless num_layers is set; without the model's size, crosstune adapts all",
        marks=frozenset({"fine_tune_type", "iters", "adapter_path", "steps_per_eval", "lora_parameters.rank"}),
        sections=frozenset({"lora_parameters"}),
    ),
    "torchtune": Tool(
        title="torchtune",
        tables="torchtune",
        defaults={"wd": 0.01, "cosine_min_lr_ratio": 0.0, "skip_eval": True, "apply_gradient_clipping": False,
                  "lr_scheduler": "constant"},
        marks=frozenset({"model._component_", "tokenizer._component_", "checkpointer._component_"}),
        sections=frozenset({"model", "tokenizer", "checkpointer", "dataset", "dataset_val", "optimizer", "lr_scheduler",
                            "loss", "metric_logger", "profiler", "dataloader", "compile", "fsdp", "quantizer",
                            "teacher_model", "kd_loss", "teacher_checkpointer", "reward_checkpointer", "checkpoint_files",
                            "value_checkpointer", "ref_checkpointer", "tensor_parallel_plan"}),
    ),
}  # fmt: skip
"""Name for --from -> trainer."""


Rule: TypeAlias = "str | Nothing | Missing | Mapping[str, Options] | Convert"
"""The option with the same meaning, a reason, their value -> options, or a function."""


@cache
def load_rules(tables: str) -> Mapping[str, Rule]:
    """Return the rules of these tables by key; later tables replace keys of earlier ones."""
    text = resources.files("crosstune.importing").joinpath("keys.yaml").read_text(encoding="utf-8")
    known = yaml.safe_load(text)
    return {key: rule for name in tables.split() for keys, rule in _rows(known[name]) for key in keys.split()}


def _rows(table: Mapping[str, Any]) -> Iterator[tuple[str, Rule]]:
    yield from ((key, key) for key in table.get("same", "").split())
    yield from table.get("renamed", {}).items()
    yield from table.get("values", {}).items()
    yield from ((keys, {"true": options, "false": {}}) for keys, options in table.get("switch", {}).items())
    yield from ((keys, _function(name)) for name, keys in table.get("computed", {}).items())
    yield from ((keys, Nothing(reason)) for reason, keys in table.get("no need", {}).items())
    yield from ((keys, Missing(advice)) for advice, keys in table.get("no counterpart", {}).items())


def _function(text: str) -> Convert:
    """Return the function of a name, or of a name with the arguments that make it."""
    name, *words = text.split()
    module = next(each for each in (values, dataset_values, torchtune_values) if hasattr(each, name))
    found = getattr(module, name)
    return found(*(int(word) if word.isdigit() else word for word in words)) if words else found


def describe(rule: Rule) -> str:
    """Return a rule in one line of Markdown."""
    if isinstance(rule, Nothing):
        return f"no need: {rule}"
    if isinstance(rule, Missing):
        return f"no counterpart: {rule}"
    if isinstance(rule, str):
        return f"`{rule}`"
    if isinstance(rule, Mapping):
        texts = [
            f"{value or 'empty'}: "
            + (", ".join(f"`{name}: {ours}`" for name, ours in options.items()) or "as is")
            for value, options in rule.items()
        ]
        return "; ".join(texts)
    return "converted by its value"
