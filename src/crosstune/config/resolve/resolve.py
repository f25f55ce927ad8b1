"""Resolve a request and facts into a plan: a pure function that records each change as an Adjustment."""

from __future__ import annotations

from dataclasses import replace

from crosstune.config.conditions import ADAPTER_METHODS, TRAIN_TYPE_PARTS, parse_losses
from crosstune.config.mlx_settings import unused_settings
from crosstune.config.resolve.check_long_rows import check_context_parallel, check_rope
from crosstune.config.resolve.choose_method import choose_method, default_rate, rate_warning
from crosstune.config.resolve.facts import Facts
from crosstune.config.resolve.fit_compute import (
    fit_compile,
    fit_kernels,
    fit_precision,
)
from crosstune.config.resolve.fit_memory import fit_memory
from crosstune.config.resolve.plan import Draft, Plan
from crosstune.config.schema import Config, option_list
from crosstune.core.errors import UserError, raise_all
from crosstune.estimate.machine import auto_reason, choose_backend
from crosstune.estimate.memory import usable_bytes
from crosstune.process.ranks import Ranks

CONTEXT_WITHOUT_FLASH = 2048
"""Context limit without flash attention: longer rows need too much memory."""
EIGHT_BIT_OPTIMIZERS_FROM = "bnb"
"""The quantizer whose library provides the 8-bit optimizers."""
_ONE_RANK_PER_DEVICE = ("nccl", "xccl")
FUSED_OPTIMIZERS_ON = ("cuda", "cpu", "mps", "xpu")
"""Torch devices; ROCm is called cuda."""
_SLOW_CPU = "a CPU is slow, suited to small models and tests"


def resolve(config: Config, facts: Facts) -> Plan:
    """Return the plan; raise one ConfigError with all problems."""
    config = _with_stored_quantization(config, facts)
    draft = _choose_backend(config, facts)
    for option, name in config.renamed.items():
        draft.warn(option, f"given as {name}", kind="name")
    for option, preset in facts.preset.items():
        draft.set(option, preset.value, preset.reason)
    if facts.ready_tracker is not None:
        reason = f"--project_name is set, and {facts.ready_tracker} is set up; --log_to tqdm turns it off"
        draft.set("log_to", f"tqdm,{facts.ready_tracker}", reason)
    choose_method(draft)
    if draft.method == "llama_pro" and draft["llama_pro_path"]:
        draft.set("model_name", draft["llama_pro_path"], "set by llama_pro_path", kind="choice")
    fit_precision(draft)
    collective = _fit_world(draft)
    _fit_attention(draft)
    check_context_parallel(draft)
    fit_kernels(draft)
    fit_compile(draft)
    _fit_optimizer(draft)
    if (
        draft.method == "full"
        and facts.has_base_model
        and not draft.is_asked("lr")
        and "lr" not in facts.preset
    ):
        rate = default_rate(optimizer=draft["optimizer"])
        draft.set(
            "lr", rate, f"typical for full fine-tuning with {draft['optimizer']}; adapters use higher rates"
        )
    if draft["low_memory"] and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, "low_memory turns it on")
    spec = facts.backends[draft.report.name]
    usable = usable_bytes(facts.machine, draft.report, spec, environment=facts.environment)
    if draft.report.engine == "mlx" or draft.report.is_torch_cpu:  # local processes share the memory
        usable //= facts.ranks.local_size if facts.ranks is not None else draft.world_size
    fitted = fit_memory(draft, limit=usable)
    _check_values(draft)
    _warn_without_effect(draft)
    if config.strict:
        for a in draft.adjustments:
            if a.kind == "change":
                draft.refuse(
                    f"{a.option} cannot be {a.requested} in this run.",
                    why=f"{a.reason}; --strict forbids {a.used} instead.",
                    do=f"use --{a.option} {a.used}, or remove --strict",
                )
    raise_all(draft.problems)
    return Plan(
        config=replace(config, **draft.values),
        machine=facts.machine,
        backend=draft.report,
        method=draft.method,
        quantizer=draft.quantizer,
        n_bits=draft.n_bits,
        world_size=draft.world_size,
        collective=collective if draft.world_size > 1 else None,
        estimated_bytes=fitted.estimated_bytes if fitted is not None else None,
        fitted=fitted,
        correction=facts.corrections.get(draft.report.name),
        usable_bytes=usable,
        adjustments=tuple(draft.adjustments),
        base=facts.base if facts.base is not None and facts.base.quantizer == draft.quantizer else None,
    )


def _with_stored_quantization(config: Config, facts: Facts) -> Config:
    """Use the quantization recorded in a quantized model folder, unless the user set a different one."""
    library, stored = TRAIN_TYPE_PARTS[config.train_type][1], facts.stored
    if library == "none" or stored is None or library not in ("auto", stored.quantizer):
        return config
    given = {name: value for name, value in stored.options.items() if name not in config.sources}
    sources = {**config.sources, **dict.fromkeys(given, stored.source)}
    return replace(config, **given, sources=sources)


def _choose_backend(config: Config, facts: Facts) -> Draft:
    machine = facts.machine
    if config.backend == "auto":
        name = choose_backend(machine, preference=facts.preference())
        draft = Draft(request=config, facts=facts, report=machine.backends[name])
        reason = auto_reason(machine, preference=facts.preference())
        if draft.report.is_torch_cpu:
            reason += f"; {_SLOW_CPU}"
        draft.set("backend", name, reason, kind="choice")
        return draft
    report = machine.backends.get(config.backend)
    if report is None or not report.available:
        raise UserError(
            f"Backend '{config.backend}' is not available",
            why=report.reason if report else f"the report of {machine.name} does not have it.",
            do=f"{facts.backends[config.backend].install.rstrip('.')}; otherwise use --backend auto, or "
            f"specify an available backend: {', '.join(machine.available())}",
        )
    draft = Draft(request=config, facts=facts, report=report)
    if report.is_torch_cpu:
        draft.warn("backend", _SLOW_CPU)
    return draft


def _fit_world(draft: Draft) -> str | None:
    """Set the number of processes, and return the communication library."""
    report, asked, ranks = draft.report, draft["world_size"], draft.facts.ranks
    num_devices = max(1, len(report.devices))
    draft.world_size = 1 if asked == -1 else asked
    if ranks is not None:
        _fit_ranks(draft, ranks)
    elif asked == -1 and num_devices > 1 and not report.is_torch_cpu and report.engine != "mlx":
        why = f"one of {num_devices} devices; `crosstune train` starts one process per device"
        draft.set("world_size", 1, why, kind="choice")
    num_local = ranks.local_size if ranks is not None else draft.world_size
    if report.engine == "mlx" and draft.world_size > 1 and num_local > 1:
        draft.warn(
            "world_size",
            "MLX processes on one machine share its GPU, useful only for tests; to train faster, start one process on each "
            "of several machines with mlx.launch",
        )
    collective = draft.facts.backends[report.name].collective
    wanted = draft["distributed_backend"]
    # Of MLX's communication libraries, only ring is supported.
    offers = () if report.engine == "mlx" else report.collectives
    if wanted not in ("auto", collective) and wanted not in offers:
        _refuse_collective(draft, wanted, collective or "auto")
    elif wanted != "auto":
        collective = wanted
    if collective in _ONE_RANK_PER_DEVICE and num_local > num_devices:
        plural = "device" if num_devices == 1 else "devices"
        draft.refuse(
            f"{num_local} processes cannot train on {num_devices} {report.name} {plural}.",
            why="the communication library needs one device per process.",
            do=f"use --world_size {num_devices}, more machines, or --distributed_backend gloo to share a device",
        )
    return collective


def _refuse_collective(draft: Draft, wanted: str, used: str) -> None:
    """Add a problem for a communication library that the backend lacks.

    Replace it in a run of one process, and on MPS, where the original interface promises that commands for NVIDIA GPUs work.
    """
    report = draft.report
    why = f"{wanted} does not run on {report.name} ({draft.facts.backends[report.name].title}), {used} does"
    if draft.world_size == 1 or report.name == "mps":
        draft.set("distributed_backend", used, why)
        return
    draft.refuse(
        f"--distributed_backend {wanted} does not work with --backend {report.name}.",
        why=f"{why}.",
        do=f"use --distributed_backend {used}, or remove it",
    )


def _fit_ranks(draft: Draft, ranks: Ranks) -> None:
    """Use the number of started processes; add a problem for options that contradict it."""
    report, asked = draft.report, draft["world_size"]
    draft.world_size = ranks.size
    if report.engine != ranks.engine:
        draft.refuse(
            f"{ranks.size} {ranks.engine} processes were started, but --backend {report.name} uses {report.engine}.",
            do=f"use a {ranks.engine} backend, or start one process without a launcher",
        )
    if asked == -1:
        draft.set("world_size", ranks.size, "the number of started processes", kind="choice")
    elif asked != ranks.size:
        draft.refuse(
            f"--world_size is {asked}, but {ranks.size} processes were started.",
            do=f"use --world_size {ranks.size}, or start {asked}",
        )


def _fit_optimizer(draft: Draft) -> None:
    optimizer, report = draft["optimizer"], draft.report
    has_fused = report.engine == "torch" and report.device in FUSED_OPTIMIZERS_ON
    has_8bit = report.name not in ("mps", "mlx") and EIGHT_BIT_OPTIMIZERS_FROM in report.quantizers
    if optimizer.startswith("fused_") and not has_fused:
        draft.set("optimizer", optimizer.removeprefix("fused_"), f"no fused optimizer on {report.name}")
    if optimizer.endswith("_8bit") and not has_8bit:
        plain = optimizer.removeprefix("paged_").removesuffix("_8bit")
        draft.set("optimizer", plain, f"no 8-bit optimizer for {report.name}; it needs bitsandbytes")
    elif optimizer == "paged_adamw_8bit" and report.is_torch_cpu:
        draft.set("optimizer", "adamw_8bit", "a CPU has nothing to page")


def _fit_attention(draft: Draft) -> None:
    """Turn off flash attention where it is missing, and limit the context."""
    shape = draft.facts.shape
    if draft["use_flash_attention"] and not draft.report.has_flash_attention:
        draft.set("use_flash_attention", False, f"no flash attention for {draft.report.name}")
        if draft["context_length"] > CONTEXT_WITHOUT_FLASH:
            reason = "without flash attention, longer rows need too much memory"
            draft.set("context_length", CONTEXT_WITHOUT_FLASH, reason)
    if shape is not None and shape.max_context and draft["context_length"] > shape.max_context:
        draft.set("context_length", shape.max_context, f"the model's context is {shape.max_context} tokens")


def _warn_without_effect(draft: Draft) -> None:
    """Warn about options that the user set but that have no effect."""
    facts, engine = draft.facts, draft.report.engine
    now = {option.name: draft[option.name] for option in option_list()} | {
        "engine": engine,
        "method": draft.method,
        "quantizer": draft.quantizer,
        "scheme": facts.quantizers.get(draft.quantizer),
        "n_bits": draft.n_bits,
        "world_size": draft.world_size,
    }
    # Options from the record of a quantized model folder were not set by the user.
    folder = facts.stored.source if facts.stored is not None else None
    for option in option_list():
        if draft.request.sources.get(option.name, folder) != folder:
            unmet = [condition for condition in option.needs if not condition.holds(now)]
            for condition in unmet[:1]:
                draft.warn(option.name, condition.reason(now))
    without_metal = engine == "mlx" and not facts.machine.system.startswith("Darwin")
    for reason in unused_settings(facts.mlx_settings, without_metal=without_metal):
        draft.warn("mlx_config", reason)


def _check_values(draft: Draft) -> None:
    """Add problems and warnings for incompatible values."""
    optimizer, has_adapters = draft["optimizer"], draft.method in ADAPTER_METHODS
    if draft.num_shards > 1 and (optimizer == "adafactor" or optimizer.endswith("_8bit")):
        each = "row and column" if optimizer == "adafactor" else "256 weights"
        draft.refuse(
            f"--optimizer {optimizer} does not work with --sharding_strategy {draft['sharding_strategy']}.",
            why=f"its state has one value per {each} of the full tensor, but a process has only a shard.",
            do=f"use --optimizer {'lion' if optimizer == 'lion_8bit' else 'adamw'}, or --sharding_strategy ddp",
        )
    adam = [name for name in ("adam_beta1", "adam_beta2", "adam_epsilon") if draft.is_asked(name)]
    if adam and "adam" not in optimizer:
        draft.refuse(
            f"--{adam[0]} does not apply to --optimizer {optimizer}.",
            why="only adamw and adam and their fused, 8-bit and paged variants read it; the constants of the other "
            "optimizers are fixed.",
            do=f"remove --{' and --'.join(adam)}, or use --optimizer adamw",
        )
    if draft["max_steps"] != -1 and not draft.is_asked("num_epochs"):
        draft.values["num_epochs"] = 0  # max_steps alone decides when to stop
    if draft["num_epochs"] == 0 and draft["max_steps"] == -1:
        draft.refuse("num_epochs is 0 and max_steps is not set.", do="set one of the two")
    if draft.is_asked("warmup_steps") and draft.is_asked("warmup_ratio"):
        draft.refuse("warmup_steps and warmup_ratio are both set.", do="keep one of the two")
    must_be_positive = {
        "lr": True,
        "lora_alpha": has_adapters,
        "loraplus_lr_ratio": has_adapters,
        "grad_norm": draft["apply_gradient_clipping"],
    }
    for option, matters in must_be_positive.items():
        if matters and draft[option] == 0:
            draft.refuse(f"{option} is 0.", why="nothing would be learned.", do="set a positive value")
    for option, why in (
        ("neftune_alpha", "only sft adds noise to embeddings."),
        ("router_aux_loss_coef", "only sft adds this loss."),
    ):
        if draft[option] and draft["recipe"] != "sft":
            draft.refuse(
                f"--{option} does not apply to the {draft['recipe']} recipe.",
                why=why,
                do=f"remove --{option}",
            )
    losses = parse_losses(draft["preference_loss"]) if draft["recipe"] == "preference" else {}
    if "robust" in losses and not draft["label_smoothing"]:
        draft.refuse(
            "--preference_loss robust needs --label_smoothing.",
            why="it corrects for that fraction of wrong labels, and with 0 it is plain dpo.",
            do="add --label_smoothing 0.1, or use --preference_loss dpo",
        )
    warning = rate_warning(draft["lr"], optimizer=optimizer, method=draft.method)
    if warning is not None and draft.facts.has_base_model:
        draft.warn("lr", warning)
    if draft["lora_dropout"] == 1:
        draft.refuse("lora_dropout is 1.", why="it would drop all adapter inputs.")
    if has_adapters and draft["init_lora"] != "default":
        _check_start(draft)
    if draft["add_tokens"]:
        _check_tokens(draft)
    if draft["rope_scaling"] != "none":
        check_rope(draft)
    if draft["layers_to_transform"] and draft.facts.mlx_settings.get("num_layers", -1) != -1:
        draft.refuse(
            "layers_to_transform and num_layers of --mlx_config are both set.", do="keep one of the two"
        )
    if draft["max_steps"] != -1 and (draft["warmup_steps"] or 0) > draft["max_steps"]:
        draft.warn("warmup_steps", "exceeds max_steps: the warm-up is shortened to the whole run")
    rows, size = draft["rows_per_step"], draft["batch_size"]
    world = max(1, draft.world_size // draft["context_parallel"])
    if rows and size and (parts := -(-rows // size)) < world:
        draft.warn(
            "rows_per_step",
            f"{rows} rows in micro-batches of {size} leave {(world - parts) * draft['context_parallel']} of {draft.world_size} devices idle",
        )
    if draft.method == "llama_pro" and draft["base_adapter"]:
        why = "llama_pro trains blocks, not adapters."
        draft.refuse("base_adapter cannot be combined with llama_pro.", why=why)


def _check_tokens(draft: Draft) -> None:
    """Add problems for values that --add_tokens excludes."""
    if not draft.facts.has_base_model:
        draft.refuse(
            f"--add_tokens does not apply to the {draft['recipe']} recipe.",
            why="it builds its own model.",
            do="remove --add_tokens",
        )
    if draft.method == "llama_pro":
        draft.refuse(
            "--add_tokens cannot be combined with llama_pro.",
            why="llama_pro trains new blocks only, and the rows of the new tokens would stay untrained.",
            do="use --train_type lora, dora or full",
        )
    if draft["tokenizer"]:
        draft.refuse(
            "--add_tokens cannot be combined with --tokenizer.",
            why="it extends the tokenizer of the model.",
            do="remove one of them, or replace the tokenizer files in the model folder",
        )


def _check_start(draft: Draft) -> None:
    """Add problems for values that --init_lora excludes."""
    start = draft["init_lora"]
    if draft["base_adapter"]:
        draft.refuse(
            f"--init_lora {start} cannot be combined with --base_adapter.",
            why="the adapters start with the weights of the base adapter.",
            do="remove one of them",
        )
    if start == "orthogonal" and draft["lora_rank"] % 2:
        draft.refuse(
            "--init_lora orthogonal needs an even --lora_rank.",
            do=f"use --lora_rank {draft['lora_rank'] + 1}",
        )
    if start == "loftq":
        _check_loftq(draft)
    if start == "pissa" and draft.quantizer != "none":
        draft.refuse(
            "--init_lora pissa does not work on a quantized base.",
            why="it subtracts the start of each adapter from the base, and quantized weights cannot be updated.",
            do="use --train_type lora, or --init_lora loftq",
        )


def _check_loftq(draft: Draft) -> None:
    """Add problems for loftq without a measurable quantization error."""
    if draft.quantizer == "none":
        draft.refuse(
            "--init_lora loftq needs a quantized base.",
            why="it starts the adapters from the error of the quantization.",
            do="use --train_type qlora, or --init_lora pissa",
        )
    elif draft.report.engine == "mlx":
        draft.refuse(
            "--init_lora loftq does not work on MLX.",
            why="only the torch engine measures the quantization error of each layer.",
            do="use --init_lora orthogonal, or a torch backend",
        )
    elif draft.facts.stored is not None:
        draft.refuse(
            "--init_lora loftq does not work with a model folder that is already quantized.",
            why="the quantization error is unknown without the original weights.",
            do="use the original model",
        )
