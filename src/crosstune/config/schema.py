"""Every option, declared once: the Python API, the flags, the YAML file, --help and the docs table read it here."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, Union

from crosstune.core.backend import BACKENDS_PACKAGE
from crosstune.core.names import plugin_names
from crosstune.core.schedule import SCHEDULES

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "fp16_autocast", "bf16_autocast", "bf16_buffers_autocast")
QUANTIZERS = ("auto", "none", "bnb", "hqq", "quanto", "mlx")
SHARDING = ("full_shard", "shard_grad_op", "ddp", "no_shard", "hybrid_full_shard", "hybrid_shard_grad_op")
OPTIMIZERS = (
    "adamw",
    "fused_adamw",
    "adamw_8bit",
    "paged_adamw_8bit",
    "adam",
    "fused_adam",
    "sgd",
    "adadelta",
    "adafactor",
)
TRAIN_TYPES = (
    "full",
    "lora",
    "qlora",
    "dora",
    "llama_pro",
    "custom_lora",
    "custom_qlora",
    "hqq_lora",
    "hqq_dora",
    "bnb_dora",
    "bnb_llama_pro",
    "hqq_llama_pro",
)
EMULATED_PACKAGE = "crosstune.emulate.devices"
MISMATCHES = ("model", "data", "order", "quantization", "trainable", "optimizer", "loss")

Choices = Sequence[str] | Callable[[], Sequence[str]]


def _option(
    default: Any,
    text: str,
    *,
    group: str,
    choices: Choices | None = None,
    aliases: Sequence[str] = (),
    low: float | None = None,
    high: float | None = None,
    env: str | None = None,
) -> Any:
    facts = {"text": text, "group": group, "choices": choices, "aliases": tuple(aliases)}
    return field(default=default, metadata=facts | {"low": low, "high": high, "env": env})


def _backend_names() -> Sequence[str]:
    return ("auto", *plugin_names(BACKENDS_PACKAGE))


def _emulated_names() -> Sequence[str]:
    return plugin_names(EMULATED_PACKAGE)


def _recipe_names() -> Sequence[str]:
    return plugin_names("crosstune.recipes")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the user asked. `asked` names the options that were given a value, and where."""

    # model
    model_name: str = _option(
        "smollm2-135m",
        "Model to train: a bundled name, a folder, a .gguf file, or a hub id",
        group="model",
        aliases=("model",),
    )
    base_adapter: str | None = _option(None, "Start from the weights of this adapter folder", group="model")
    llama_pro_path: str | None = _option(
        None,
        "Folder of a block-expanded model for llama_pro, named ..._blk_exp-OLD-NEW; taken instead of model_name",
        group="model",
    )
    mlx_config: str | None = _option(None, "JSON or YAML file with settings of the MLX engine", group="model")

    # data
    dataset: str = _option(
        "commands",
        "Data to train on: a known name, a .json, .jsonl, .csv, .tsv or .parquet file, a folder of them, or a hub id",
        group="data",
    )
    eval_dataset: str | None = _option(
        None,
        "Held-out data; unset, the data set's own held-out split, or a tenth of it up to eval_samples",
        group="data",
    )
    dataset_format: str = _option(
        "auto",
        "How a row is read; auto recognises it by its columns",
        group="data",
        choices=(
            "auto",
            "messages",
            "sharegpt",
            "alpaca",
            "prompt_completion",
            "question_answer",
            "guanaco",
            "text",
        ),
    )
    dataset_samples: int = _option(
        -1,
        "Use at most this many training examples; -1 for all",
        group="data",
        aliases=("max_samples",),
        low=-1,
    )
    eval_samples: int = _option(
        64,
        "Evaluate on at most this many held-out examples; 0 for none",
        group="data",
        aliases=("test_samples",),
        low=0,
    )
    eval_metric: str = _option(
        "auto",
        "What an evaluation measures beside the loss; auto: exact_match for the bundled data, else loss alone",
        group="data",
        choices=("auto", "loss", "exact_match"),
    )
    context_length: int = _option(
        2048, "Longest example in tokens", group="data", aliases=("max_seq_length",), low=2
    )
    truncation: str = _option(
        "error",
        "An example longer than the context: stop with an error, cut its end, or leave it out",
        group="data",
        choices=("error", "cut", "drop"),
    )
    packing: bool = _option(False, "Pack whole documents into full rows", group="data")
    train_on_prompt: bool = _option(
        False, "Put loss on the prompt too, not only on the answers", group="data"
    )
    loading_workers: int = _option(
        -1, "Workers that load and quantize weights; -1 to choose", group="data", low=-1
    )

    # method
    recipe: str = _option("sft", "Kind of training", group="method", choices=_recipe_names)
    train_type: str = _option("lora", "What is trained, over which base", group="method", choices=TRAIN_TYPES)
    lora_rank: int = _option(16, "Rank of the adapters", group="method", low=1)
    lora_alpha: float = _option(32, "Adapters are scaled by alpha / rank", group="method", low=0)
    lora_dropout: float = _option(0.0, "Dropout in front of the adapters", group="method", low=0)
    lora_target_modules: str = _option(
        "all",
        "Linear layers that get an adapter: all, default (query and value), names with commas, or a regex of whole names",
        group="method",
    )
    use_rslora: bool = _option(False, "Scale adapters by alpha / sqrt(rank) instead (rsLoRA)", group="method")
    loraplus_lr_ratio: float = _option(
        1, "Learning rate of the B matrices over that of A (LoRA+)", group="method", low=0
    )
    num_new_blocks: int = _option(1, "Blocks that llama_pro adds, spread evenly", group="method", low=1)
    quantization_backend: str = _option(
        "auto", "Library that quantizes the frozen base", group="method", choices=QUANTIZERS
    )
    n_bits: int = _option(4, "Bits of the quantized base", group="method", low=1)
    group_size: int = _option(
        64,
        "Weights that share a scale in the quantized base",
        group="method",
        aliases=("hqq_group_size",),
        low=1,
    )
    quant_type: str = _option(
        "auto",
        "Numbers of the quantized base: nf4 or fp4 (bnb), int or float8 (quanto); auto: the library's usual",
        group="method",
        choices=("auto", "nf4", "fp4", "int", "float8"),
    )
    double_quant: bool = _option(
        True, "Quantize the scales of the quantized base too (bnb, 4 bits)", group="method"
    )
    no_4bit: bool = _option(
        False, "Keep the base in 16 bits even where the train type says otherwise", group="method"
    )

    # training
    num_epochs: float = _option(1, "Passes over the data", group="training", aliases=("epochs",), low=0)
    max_steps: int = _option(
        -1, "Stop after this many optimizer steps; -1 for no limit", group="training", low=-1
    )
    batch_size: int = _option(8, "Rows in a micro-batch, per device", group="training", low=1)
    gradient_accumulation_steps: int = _option(
        1, "Micro-batches in an optimizer step", group="training", aliases=("gradient_accumulation",), low=1
    )
    optimizer: str = _option("adamw", "Optimizer", group="training", choices=OPTIMIZERS)
    lr: float = _option(2e-4, "Peak learning rate", group="training", aliases=("learning_rate",), low=0)
    wd: float = _option(
        0.01,
        "Weight decay of matrices: apart from the gradient (adamw, adafactor), or added to it (adam, sgd, adadelta)",
        group="training",
        aliases=("weight_decay",),
        low=0,
    )
    lr_scheduler: str = _option("cosine", "Learning-rate schedule", group="training", choices=SCHEDULES)
    warmup_steps: int | None = _option(None, "Steps of linear warm-up", group="training", low=0)
    warmup_ratio: float | None = _option(
        None, "Warm-up as a share of all steps; unset, 0.1 for schedules that decay", group="training", low=0
    )
    cosine_min_lr_ratio: float = _option(
        0.1, "Where the decay ends, as a share of the peak", group="training", low=0
    )
    apply_gradient_clipping: bool = _option(True, "Clip the norm of the gradient", group="training")
    grad_norm: float = _option(1.0, "Largest norm of the gradient", group="training", low=0)
    seed: int = _option(
        42, "Seed of data order, initial adapters and dropout", group="training", low=0, high=2**63 - 1
    )

    # hardware
    backend: str = _option(
        "auto", "Where to train", group="hardware", choices=_backend_names, env="FSDP_BACKEND"
    )
    emulate: str | None = _option(
        None,
        "Instead of training, try a few steps on this CPU and say whether the run would work on this backend",
        group="hardware",
        choices=_emulated_names,
    )
    precision: str = _option(
        "auto", "Number formats of weights and arithmetic", group="hardware", choices=PRECISIONS
    )
    use_gradient_checkpointing: bool = _option(
        False, "Recompute activations in the backward pass to save memory", group="hardware"
    )
    reentrant_checkpointing: bool = _option(
        False, "Use torch's re-entrant kind of checkpointing", group="hardware"
    )
    use_flash_attention: bool | None = _option(
        None, "Use flash attention; unset, wherever it runs", group="hardware"
    )
    low_memory: bool = _option(False, "Trade speed for memory wherever there is a choice", group="hardware")
    world_size: int = _option(
        -1, "Number of devices; -1 for all. On MLX, of processes; -1 for one", group="hardware", low=-1
    )
    sharding_strategy: str = _option(
        "full_shard", "How weights are divided over several devices", group="hardware", choices=SHARDING
    )
    distributed_backend: str = _option(
        "auto",
        "What devices talk through",
        group="hardware",
        choices=("auto", "nccl", "gloo", "xccl", "ring"),
    )
    use_cpu_offload: bool = _option(False, "Keep sharded weights in host memory", group="hardware")
    use_activation_cpu_offload: bool = _option(
        False, "Keep saved activations in host memory", group="hardware"
    )
    no_sync: bool = _option(
        False, "Do not reduce gradients between micro-batches of a step", group="hardware"
    )
    master_addr: str = _option("localhost", "Address of the first process", group="hardware")
    master_port: int = _option(12355, "Port of the first process", group="hardware", low=1)

    # run
    output_dir: str = _option("runs", "Folder that holds run folders", group="run")
    name: str | None = _option(None, "Name of the run folder; unset, the time and the model", group="run")
    overwrite: bool = _option(False, "Move a run that has this name aside, instead of refusing", group="run")
    save_model: bool = _option(True, "Write the trained adapter or model at the end", group="run")
    save_steps: int = _option(0, "Write a checkpoint every so many steps; 0 for none", group="run", low=0)
    save_minutes: float = _option(
        10, "Write a checkpoint when the last one is this old; 0 for never", group="run", low=0
    )
    keep_last_n: int = _option(3, "Newest checkpoints to keep", group="run", low=1)
    keep_best: bool = _option(
        True, "Keep the checkpoint with the lowest loss in an evaluation too", group="run"
    )
    keep_every: int = _option(
        0, "Keep checkpoints whose step is a multiple of this for good; 0 for none", group="run", low=0
    )
    on_save_error: str = _option(
        "stop",
        "When a checkpoint cannot be written: stop the run, or continue and try again at the next",
        group="run",
        choices=("stop", "continue"),
    )
    resume: str = _option(
        "none",
        "Continue a run: auto (the newest valid checkpoint of --name, if there is one), none, or the path of a run, a "
        "checkpoint, or an archive that `crosstune move` wrote",
        group="run",
        aliases=("resume_from_checkpoint",),
    )
    allow_mismatch: str = _option(
        "",
        "What may differ from the checkpoint when a run continues, with commas: model, data, order, quantization, trainable, optimizer, loss",
        group="run",
    )
    skip_nonfinite: int = _option(
        0, "Steps with a loss or gradient that is not finite to leave out before stopping", group="run", low=0
    )
    time_limit: str | None = _option(
        None, "Stop with a checkpoint before this much time has passed, such as 3h30m", group="run"
    )
    eval_steps: int = _option(
        0, "Evaluate every so many steps; 0 for before and after only", group="run", low=0
    )
    skip_eval: bool = _option(False, "Do not evaluate at all", group="run")
    num_samples: int = _option(
        3, "Held-out prompts whose answers are kept at each evaluation", group="run", low=0
    )
    max_new_tokens: int = _option(64, "Longest answer generated in an evaluation", group="run", low=1)
    log_to: str = _option(
        "tqdm",
        "Where progress goes: tqdm is the live line, stdout plain lines",
        group="run",
        choices=("tqdm", "stdout", "wandb"),
    )
    log_every_n_steps: int = _option(
        1, "Print a line every so many steps; under the live line only when asked for", group="run", low=1
    )
    verbose: bool = _option(False, "Print more", group="run")
    strict: bool = _option(False, "Refuse to change anything that was asked", group="run")
    project_name: str = _option("crosstune", "Project in wandb", group="run")
    group: str | None = _option(None, "Group in wandb", group="run")
    entity: str | None = _option(None, "Entity in wandb", group="run")

    # profiling
    profile: bool = _option(False, "Profile the training steps", group="profiling")
    profiling_output: str = _option("profiles", "Folder for profiles", group="profiling")
    profile_memory: bool = _option(False, "Record memory allocations of the first steps", group="profiling")
    with_stack: bool = _option(False, "Record call stacks", group="profiling")
    with_shapes: bool = _option(False, "Record shapes of operators", group="profiling")
    export_trace: bool = _option(True, "Write a trace file", group="profiling")
    export_memory_timeline: bool = _option(False, "Write a memory timeline", group="profiling")
    wait_steps: int = _option(0, "Steps the profiler skips at first", group="profiling", low=0)
    profiler_warmup_steps: int = _option(1, "Steps the profiler warms up", group="profiling", low=0)
    active_steps: int = _option(2, "Steps the profiler records", group="profiling", low=1)
    repeat: int = _option(
        0, "How often the profiler repeats its cycle; 0 for always", group="profiling", low=0
    )
    profiling_frequency: int = _option(10, "Profile every so many steps", group="profiling", low=1)

    asked: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option -> where its value came from: 'flag --lr', 'FSDP_BACKEND', a file, or 'argument'."""

    def options(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in option_list()}

    def options_asked(self) -> dict[str, Any]:
        return {name: value for name, value in self.options().items() if name in self.asked}


def mismatches(words: str) -> list[str]:
    """The parts of `allow_mismatch`."""
    return [word.strip() for word in words.split(",") if word.strip()]


GROUPS = {
    "model": "Model",
    "data": "Data",
    "method": "Method",
    "training": "Training",
    "hardware": "Hardware",
    "run": "Run folder and output",
    "profiling": "Profiling",
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One declaration of `Config`, ready for a parser."""

    name: str
    type: type
    optional: bool
    default: Any
    text: str
    group: str
    aliases: tuple[str, ...]
    low: float | None
    high: float | None
    env: str | None
    fixed_choices: Choices | None

    @property
    def choices(self) -> tuple[str, ...] | None:
        if self.fixed_choices is None:
            return None
        return tuple(self.fixed_choices() if callable(self.fixed_choices) else self.fixed_choices)


@lru_cache(maxsize=1)
def option_list() -> tuple[Option, ...]:
    hints = typing.get_type_hints(Config)
    return tuple(_read_option(item, hints[item.name]) for item in fields(Config) if item.name != "asked")


def _read_option(item: Any, hint: Any) -> Option:
    optional = typing.get_origin(hint) in (types.UnionType, Union)
    kind = next(arg for arg in typing.get_args(hint) if arg is not type(None)) if optional else hint
    assert item.default is not MISSING, item.name
    return Option(
        name=item.name,
        type=kind,
        optional=optional,
        default=item.default,
        text=item.metadata["text"],
        group=item.metadata["group"],
        aliases=item.metadata["aliases"],
        low=item.metadata["low"],
        high=item.metadata["high"],
        env=item.metadata["env"],
        fixed_choices=item.metadata["choices"],
    )


@lru_cache(maxsize=1)
def options_by_name() -> dict[str, Option]:
    """Every name an option answers to, aliases included."""
    return {name: option for option in option_list() for name in (option.name, *option.aliases)}
