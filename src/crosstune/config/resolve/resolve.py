"""Resolve a request and facts into a plan: a pure function that records each change as an Adjustment."""

from __future__ import annotations

from dataclasses import replace

from crosstune.config.conditions import TRAIN_TYPE_PARTS, ResolvedOptions, idle_reason, shards_weights
from crosstune.config.mlx_settings import idle_settings
from crosstune.config.resolve.choose_method import choose_method
from crosstune.config.resolve.facts import Facts
from crosstune.config.resolve.fit_compute import fit_compile, fit_kernels, fit_precision
from crosstune.config.resolve.fit_memory import fit_memory
from crosstune.config.resolve.plan import Adjustment, Draft, Plan
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


def resolve(config: Config, facts: Facts) -> Plan:
    """Return the plan; raise one ConfigError with all problems."""
    config = _with_stored_quantization(config, facts)
    draft = _choose_backend(config, facts)
    _mention_names(draft)
    for option, preset in facts.preset.items():
        draft.set(option, preset.value, preset.reason)
    method, quantizer, n_bits = choose_method(draft)
    if method == "llama_pro" and draft["llama_pro_path"]:
        draft.set("model_name", draft["llama_pro_path"], "set by llama_pro_path", kind="choice")
    fit_precision(draft)
    world_size, collective = _fit_world(draft)
    _fit_attention(draft)
    fit_kernels(draft, method=method, quantizer=quantizer, world_size=world_size)
    fit_compile(draft, world_size=world_size)
    _fit_optimizer(draft)
    if draft["low_memory"] and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, "low_memory turns it on")
    usable = usable_bytes(
        facts.machine, draft.report, facts.backends[draft.report.name], environment=facts.environment
    ) // _num_sharing(draft, world_size)
    shares = (
        world_size if draft.report.engine == "torch" and shards_weights(draft["sharding_strategy"]) else 1
    )
    fitted = fit_memory(
        draft, method=method, quantizer=quantizer, n_bits=n_bits, limit=usable, num_shards=shares
    )
    _check_sharded_optimizer(draft, num_shards=shares)
    _check_values(draft, method)
    decided = ResolvedOptions(
        options={option.name: draft[option.name] for option in option_list()},
        engine=draft.report.engine,
        method=method,
        quantizer=facts.quantizers.get(quantizer),
        n_bits=n_bits,
        world_size=world_size,
    )
    _warn_without_effect(draft, decided)
    if config.strict:
        draft.problems += [_forbidden(a) for a in draft.adjustments if a.kind == "change"]
    raise_all(draft.problems)
    return Plan(
        config=replace(config, **draft.values),
        machine=facts.machine,
        backend=draft.report,
        method=method,
        quantizer=quantizer,
        n_bits=n_bits,
        world_size=world_size,
        collective=collective,
        estimated_bytes=fitted.estimated_bytes if fitted is not None else None,
        fitted=fitted,
        correction=facts.corrections.get(draft.report.name),
        usable_bytes=usable,
        adjustments=tuple(draft.adjustments),
        base=facts.base if facts.base is not None and facts.base.quantizer == quantizer else None,
    )


def _mention_names(draft: Draft) -> None:
    """Record options set under another trainer's name."""
    for option, name in draft.request.renamed.items():
        value = getattr(draft.request, option)
        draft.adjustments.append(
            Adjustment(option=option, requested=value, used=value, reason=f"given as {name}", kind="name")
        )


def _with_stored_quantization(config: Config, facts: Facts) -> Config:
    """Use the quantization recorded in a quantized model folder, unless the user set a different one."""
    library, stored = TRAIN_TYPE_PARTS[config.train_type][1], facts.stored
    if library == "none" or stored is None or library not in ("auto", stored.quantizer):
        return config
    given = {name: value for name, value in stored.options.items() if name not in config.sources}
    sources = {**config.sources, **dict.fromkeys(given, stored.source)}
    return replace(config, **given, sources=sources)


def _num_sharing(draft: Draft, world_size: int) -> int:
    """Return the number of processes that share the same memory."""
    if draft.report.engine != "mlx" and not draft.report.is_torch_cpu:
        return 1
    ranks = draft.facts.ranks
    return ranks.local_size if ranks is not None else world_size


def _forbidden(adjustment: Adjustment) -> UserError:
    return UserError(
        f"{adjustment.option} cannot be {adjustment.requested} here.",
        why=f"{adjustment.reason}; --strict forbids {adjustment.used} instead.",
        do=f"use --{adjustment.option} {adjustment.used}, or remove --strict",
    )


def _choose_backend(config: Config, facts: Facts) -> Draft:
    machine = facts.machine
    if config.backend == "auto":
        name = choose_backend(machine, preference=facts.preference())
        draft = Draft(request=config, facts=facts, report=machine.backends[name])
        reason = auto_reason(machine, preference=facts.preference())
        if draft.report.is_torch_cpu:
            reason += "; a CPU is slow, suited to small models and tests"
        draft.set("backend", name, reason, kind="choice")
        return draft
    report = machine.backends.get(config.backend)
    if report is None or not report.available:
        reason = report.reason if report else f"the report of {machine.name} does not have it."
        raise UserError(
            f"Backend '{config.backend}' is not available",
            why=reason,
            do=f"{facts.backends[config.backend].install.rstrip('.')}; or use --backend auto, or one of those available: "
            f"{', '.join(machine.available())}",
        )
    return Draft(request=config, facts=facts, report=report)


def _fit_world(draft: Draft) -> tuple[int, str | None]:
    """Return the number of processes, and the communication library if there is more than one."""
    report, asked, ranks = draft.report, draft["world_size"], draft.facts.ranks
    num_devices = max(1, len(report.devices))
    world_size = 1 if asked == -1 else asked
    if ranks is not None:
        world_size = _fit_ranks(draft, ranks)
    elif asked == -1 and num_devices > 1 and not report.is_torch_cpu and report.engine != "mlx":
        why = f"one of {num_devices} devices; `crosstune train` starts one process per device"
        draft.set("world_size", 1, why, kind="choice")
    if report.engine == "mlx" and world_size > 1 and (ranks is None or ranks.local_size > 1):
        draft.warn(
            "world_size",
            "MLX processes on one machine share its GPU, useful only for tests; to train faster, start one process on each "
            "of several machines with mlx.launch",
        )
    collective = draft.facts.backends[report.name].collective
    wanted = draft["distributed_backend"]
    # Of the libraries of MLX, only its ring is supported.
    offers = () if report.engine == "mlx" else report.collectives
    if wanted not in ("auto", collective) and wanted not in offers:
        _refuse_collective(draft, wanted, collective or "auto", world_size=world_size)
    elif wanted != "auto":
        collective = wanted
    if collective in _ONE_RANK_PER_DEVICE:
        _check_devices(draft, ranks.local_size if ranks is not None else world_size, num_devices)
    return world_size, collective if world_size > 1 else None


def _refuse_collective(draft: Draft, wanted: str, used: str, *, world_size: int) -> None:
    """Add a problem for a communication library that the backend lacks.

    Replace it in a run of one process, and on MPS, where the original interface promises that commands for NVIDIA GPUs work.
    """
    report = draft.report
    why = f"{wanted} does not run on {report.name} ({draft.facts.backends[report.name].title}), {used} does"
    if world_size == 1 or report.name == "mps":
        draft.set("distributed_backend", used, why)
        return
    draft.problems.append(
        UserError(
            f"--distributed_backend {wanted} does not work with --backend {report.name}.",
            why=f"{why}.",
            do=f"use --distributed_backend {used}, or remove it",
        )
    )


def _check_devices(draft: Draft, num_local: int, num_devices: int) -> None:
    """Add a problem for more processes than devices on a machine."""
    if num_local > num_devices:
        plural = "device" if num_devices == 1 else "devices"
        draft.problems.append(
            UserError(
                f"{num_local} processes cannot train on {num_devices} {draft.report.name} {plural}.",
                why="the communication library needs one device per process.",
                do=f"use --world_size {num_devices}, more machines, or --distributed_backend gloo to share a device",
            )
        )


def _fit_ranks(draft: Draft, ranks: Ranks) -> int:
    """Return the number of started processes; add a problem for options that contradict it."""
    report, asked = draft.report, draft["world_size"]
    if report.engine != ranks.engine:
        draft.problems.append(
            UserError(
                f"{ranks.size} {ranks.engine} processes were started, but --backend {report.name} uses {report.engine}.",
                do=f"use a {ranks.engine} backend, or start one process without a launcher",
            )
        )
    if asked == -1:
        draft.set("world_size", ranks.size, "the number of started processes", kind="choice")
    elif asked != ranks.size:
        draft.problems.append(
            UserError(
                f"--world_size is {asked}, but {ranks.size} processes were started.",
                do=f"use --world_size {ranks.size}, or start {asked}",
            )
        )
    return ranks.size


def _check_sharded_optimizer(draft: Draft, *, num_shards: int) -> None:
    """Add a problem for an optimizer whose state cannot be sharded, because it is not one value per weight."""
    optimizer = draft["optimizer"]
    if num_shards > 1 and (optimizer == "adafactor" or optimizer.endswith("_8bit")):
        each = "row and column" if optimizer == "adafactor" else "256 weights"
        draft.problems.append(
            UserError(
                f"--optimizer {optimizer} does not work with --sharding_strategy {draft['sharding_strategy']}.",
                why=f"its state has one value per {each} of the full tensor, but a process has only a shard.",
                do="use --optimizer adamw, or --sharding_strategy ddp",
            )
        )


def _fit_optimizer(draft: Draft) -> None:
    optimizer, report = draft["optimizer"], draft.report
    has_fused = report.engine == "torch" and report.device in FUSED_OPTIMIZERS_ON
    if optimizer.startswith("fused_") and not has_fused:
        draft.set("optimizer", optimizer.removeprefix("fused_"), f"no fused optimizer on {report.name}")
    if optimizer.endswith("_8bit") and (
        report.name in ("mps", "mlx") or EIGHT_BIT_OPTIMIZERS_FROM not in report.quantizers
    ):
        draft.set(
            "optimizer",
            "adamw",
            f"no 8-bit optimizer for {report.name}; it needs bitsandbytes",
        )
    elif optimizer == "paged_adamw_8bit" and report.is_torch_cpu:
        draft.set("optimizer", "adamw_8bit", "a CPU has nothing to page")


def _fit_attention(draft: Draft) -> None:
    """Turn off flash attention where it is missing, and limit the context."""
    shape = draft.facts.shape
    if draft["use_flash_attention"] and not draft.report.has_flash_attention:
        draft.set("use_flash_attention", False, f"no flash attention for {draft.report.name}")
        if draft["context_length"] > CONTEXT_WITHOUT_FLASH:
            draft.set(
                "context_length",
                CONTEXT_WITHOUT_FLASH,
                "without flash attention, longer rows need too much memory",
            )
    if shape is not None and shape.max_context and draft["context_length"] > shape.max_context:
        draft.set("context_length", shape.max_context, f"the model's context is {shape.max_context} tokens")


def _warn_without_effect(draft: Draft, decided: ResolvedOptions) -> None:
    facts = draft.facts
    # Options from the record of a quantized model folder were not set by the user.
    folder = facts.stored.source if facts.stored is not None else None
    for option in option_list():
        reason = idle_reason(option.needs, decided)
        if reason and draft.is_asked(option.name) and draft.request.sources[option.name] != folder:
            draft.warn(option.name, reason)
    without_metal = decided.engine == "mlx" and not facts.machine.system.startswith("Darwin")
    for reason in idle_settings(facts.mlx_settings, without_metal=without_metal):
        draft.warn("mlx_config", reason)


def _check_values(draft: Draft, method: str) -> None:
    """Add problems and warnings for incompatible values."""
    if draft["max_steps"] != -1 and not draft.is_asked("num_epochs"):
        draft.values["num_epochs"] = 0  # max_steps alone decides when to stop
    if draft["num_epochs"] == 0 and draft["max_steps"] == -1:
        draft.problems.append(UserError("num_epochs is 0 and max_steps is not set.", do="set one of the two"))
    if draft.is_asked("warmup_steps") and draft.is_asked("warmup_ratio"):
        draft.problems.append(
            UserError("warmup_steps and warmup_ratio are both set.", do="keep one of the two")
        )
    must_be_positive = [
        ("lr", True),
        ("lora_alpha", method in ("lora", "dora")),
        ("loraplus_lr_ratio", method in ("lora", "dora")),
        ("grad_norm", draft["apply_gradient_clipping"]),
    ]
    for option, matters in must_be_positive:
        if matters and draft[option] == 0:
            draft.problems.append(
                UserError(f"{option} is 0.", why="nothing would be learned.", do="set a positive value")
            )
    if draft["lora_dropout"] == 1:
        draft.problems.append(UserError("lora_dropout is 1.", why="it would drop all adapter inputs."))
    if draft["max_steps"] != -1 and (draft["warmup_steps"] or 0) > draft["max_steps"]:
        draft.warn("warmup_steps", "exceeds max_steps: the warm-up is shortened to the whole run")
    if method == "llama_pro" and draft["base_adapter"]:
        draft.problems.append(
            UserError(
                "base_adapter cannot be combined with llama_pro.",
                why="llama_pro trains blocks, not adapters.",
            )
        )
