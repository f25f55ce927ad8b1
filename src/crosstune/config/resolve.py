"""Resolve a request and the facts into a plan. This is a pure function; each change is an Adjustment with a reason."""

from __future__ import annotations

from dataclasses import replace

from crosstune.config.check_values import check_values
from crosstune.config.choose_method import choose_method
from crosstune.config.conditions import Decided
from crosstune.config.draft import Draft
from crosstune.config.facts import Facts
from crosstune.config.fit_memory import fit_memory
from crosstune.config.idle_options import warn_without_effect
from crosstune.config.plan import Adjustment, Plan
from crosstune.config.schema import Config, option_list
from crosstune.config.train_types import TRAIN_TYPE_PARTS
from crosstune.core.errors import UserError, raise_all
from crosstune.core.machine import BackendReport, auto_reason, choose_backend
from crosstune.core.ranks import Ranks

EIGHT_BIT_OPTIMIZERS_FROM = "bnb"
"""The quantizer whose library has the 8-bit optimizers."""
FUSED_OPTIMIZERS_ON = ("cuda", "cpu", "mps", "xpu")
"""Devices of torch; ROCm's is called cuda."""
CONTEXT_WITHOUT_FLASH = 2048
BF16_WORTH_IT = 1.3


def resolve(config: Config, facts: Facts) -> Plan:
    """Return the plan for these facts; raise one ConfigError with all problems."""
    config = _with_stored_quantization(config, facts)
    draft = _choose_backend(config, facts)
    _mention_names(draft)
    method, quantizer, n_bits = choose_method(draft)
    if method == "llama_pro" and draft["llama_pro_path"]:
        draft.set("model_name", draft["llama_pro_path"], "llama_pro_path names it", kind="choice")
    _fit_precision(draft)
    world_size, collective = _fit_world(draft)
    _fit_attention(draft)
    _fit_optimizer(draft)
    if draft["low_memory"] and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, "low_memory recomputes activations")
    estimate = fit_memory(
        draft, method=method, quantizer=quantizer, n_bits=n_bits, sharing=_num_sharing(draft, world_size)
    )
    check_values(draft, method)
    decided = Decided(
        options={option.name: draft[option.name] for option in option_list()},
        engine=draft.report.engine,
        method=method,
        quantizer=facts.quantizers.get(quantizer),
        n_bits=n_bits,
        world_size=world_size,
    )
    warn_without_effect(draft, decided)
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
        estimated_bytes=estimate,
        adjustments=tuple(draft.adjustments),
    )


def _mention_names(draft: Draft) -> None:
    """Record the options that were set under another trainer's name."""
    for option, name in draft.asked.renamed.items():
        value = getattr(draft.asked, option)
        draft.adjustments.append(
            Adjustment(option=option, asked=value, used=value, reason=f"given as {name}", kind="name")
        )


def _with_stored_quantization(config: Config, facts: Facts) -> Config:
    """Take the quantization options from a folder of quantized weights, except those that the user set."""
    library, stored = TRAIN_TYPE_PARTS[config.train_type][1], facts.stored
    if library == "none" or stored is None or library not in ("auto", stored.quantizer):
        return config
    given = {name: value for name, value in stored.options.items() if name not in config.asked}
    sources = {**config.asked, **dict.fromkeys(given, stored.source)}
    return replace(config, **given, asked=sources)


def _num_sharing(draft: Draft, world_size: int) -> int:
    """Return how many processes use the same memory."""
    if draft.report.engine != "mlx":
        return 1
    ranks = draft.facts.ranks
    return ranks.local_size if ranks is not None else world_size


def _forbidden(adjustment: Adjustment) -> UserError:
    return UserError(
        f"{adjustment.option} cannot stay {adjustment.asked}.",
        why=f"{adjustment.reason}; --strict forbids using {adjustment.used} instead.",
        do=f"use --{adjustment.option} {adjustment.used}, or leave out --strict",
    )


def _choose_backend(config: Config, facts: Facts) -> Draft:
    machine = facts.machine
    if config.backend == "auto":
        name = choose_backend(machine, preference=list(facts.backends))
        draft = Draft(asked=config, facts=facts, report=machine.backends[name])
        reason = auto_reason(machine, preference=list(facts.backends))
        draft.set("backend", name, reason, kind="choice")
        if draft.report.is_torch_cpu:
            draft.warn("backend", "training on a CPU is very slow: use it for small models and for tests")
        return draft
    report = machine.backends.get(config.backend)
    if report is None or not report.available:
        reason = report.reason if report else f"{machine.name} has no report on it."
        raise UserError(
            f"Backend '{config.backend}' is not available",
            why=reason,
            do=f"{facts.backends[config.backend].install.rstrip('.')}; or use --backend auto, or one that is available here: "
            f"{', '.join(machine.available())}",
        )
    draft = Draft(asked=config, facts=facts, report=report)
    if report.is_torch_cpu:
        draft.warn("backend", "training on a CPU is very slow: use it for small models and for tests")
    return draft


def _fit_precision(draft: Draft) -> None:
    asked, report = draft["precision"], draft.report
    if asked == "auto":
        used, reason = _best_precision(report)
        draft.set("precision", used, reason, kind="choice")
        return
    dtype = asked.split("_")[0]
    if dtype in report.dtypes:
        if report.engine == "mlx" and dtype != asked:
            draft.set("precision", dtype, "MLX has no autocast; trained weights are kept in fp32")
        return
    title = report.name.upper()
    full_name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    for other in ("fp16", "bf16", "fp32"):
        if other in report.dtypes:
            keeps = asked.endswith("_autocast") and other != "fp32" and report.engine != "mlx"
            suffix = "_autocast" if keeps else ""
            draft.set(
                "precision",
                other + suffix,
                f"{title} backend doesn't support {full_name} here",
                kind="change",
            )
            return
    draft.problems.append(
        UserError(f"No number format works on {report.name} here.", why="see: crosstune doctor")
    )


def _best_precision(report: BackendReport) -> tuple[str, str]:
    if report.device == "cpu":
        if "bf16" in report.dtypes and report.bf16_speedup >= BF16_WORTH_IT:
            return (
                "bf16_autocast",
                f"bf16 matrix products are {report.bf16_speedup:.1f}x as fast as fp32 here",
            )
        return "fp32", "bf16 is not faster on this CPU"
    if "bf16" in report.dtypes:
        return "bf16", "bf16 works here; trained weights are kept in fp32"
    if "fp16" in report.dtypes and report.name != "mps":
        short = "fp16" if report.engine == "mlx" else "fp16_autocast"
        return short, "no bf16 here; fp16 with loss scaling"
    return (
        "fp32",
        "no bf16 here, and fp16 is prone to overflow"
        if "fp16" in report.dtypes
        else "no 16-bit format works here",
    )


def _fit_world(draft: Draft) -> tuple[int, str | None]:
    """Return the number of processes, and the communication library when there are several."""
    report, asked, ranks = draft.report, draft["world_size"], draft.facts.ranks
    num_devices = max(1, len(report.devices))
    world_size = 1 if asked == -1 else asked
    if ranks is not None:
        world_size = _fit_ranks(draft, ranks)
    elif asked == -1 and num_devices > 1 and not report.is_torch_cpu and report.engine != "mlx":
        draft.set("world_size", 1, f"one of {num_devices} devices; training on several is not built yet")
    if report.engine == "mlx":
        if world_size > 1 and (ranks is None or ranks.local_size > 1):
            draft.warn(
                "world_size",
                "MLX processes on one machine share its GPU, which is for tests only; to train faster, start one on each "
                "of several machines with mlx.launch",
            )
    elif not report.is_torch_cpu and world_size > num_devices:
        plural = "device" if num_devices == 1 else "devices"
        draft.set("world_size", num_devices, f"{report.name} has {num_devices} {plural} here")
        world_size = num_devices
    collective = draft.facts.backends[report.name].collective
    wanted = draft["distributed_backend"]
    offers = (
        () if report.engine == "mlx" else report.collectives
    )  # MLX has others; only its ring is supported
    if wanted not in ("auto", collective) and wanted not in offers:
        draft.set("distributed_backend", collective or "auto", f"{report.name} has no {wanted}")
    elif wanted != "auto":
        collective = wanted
    return world_size, collective if world_size > 1 else None


def _fit_ranks(draft: Draft, ranks: Ranks) -> int:
    """Return the number of processes that were started; add a problem when the options contradict it."""
    report, asked = draft.report, draft["world_size"]
    if report.engine != ranks.engine:
        draft.problems.append(
            UserError(
                f"{ranks.size} {ranks.engine} processes were started, but --backend {report.name} is not for them.",
                do=f"use --backend {ranks.engine}, or start one process without mlx.launch",
            )
        )
    if asked == -1:
        draft.set("world_size", ranks.size, "the number of processes that were started", kind="choice")
    elif asked != ranks.size:
        draft.problems.append(
            UserError(
                f"--world_size is {asked}, but {ranks.size} processes were started.",
                do=f"use --world_size {ranks.size}, or start {asked}",
            )
        )
    return ranks.size


def _fit_attention(draft: Draft) -> None:
    shape = draft.facts.shape
    # MLX has its own fused attention, which stands for flash attention.
    has_flash = any("flash" in kernel for kernel in draft.report.attention) or draft.report.engine == "mlx"
    if draft["use_flash_attention"] and not has_flash:
        draft.set("use_flash_attention", False, f"no flash attention on {draft.report.name} here")
        if draft["context_length"] > CONTEXT_WITHOUT_FLASH:
            draft.set(
                "context_length",
                CONTEXT_WITHOUT_FLASH,
                "without flash attention, longer rows need too much memory",
            )
    if shape is not None and shape.max_context and draft["context_length"] > shape.max_context:
        draft.set("context_length", shape.max_context, f"the model's context is {shape.max_context} tokens")


def _fit_optimizer(draft: Draft) -> None:
    optimizer, report = draft["optimizer"], draft.report
    has_fused = report.engine == "torch" and report.device in FUSED_OPTIMIZERS_ON
    if optimizer.startswith("fused_") and not has_fused:
        draft.set("optimizer", optimizer.removeprefix("fused_"), f"no fused optimizer on {report.name}")
    if optimizer.endswith("_8bit") and (
        report.name in ("mps", "mlx") or EIGHT_BIT_OPTIMIZERS_FROM not in report.quantizers
    ):
        draft.set(
            "optimizer", "adamw", f"no 8-bit optimizer on {report.name} here; it comes with bitsandbytes"
        )
    elif optimizer == "paged_adamw_8bit" and report.is_torch_cpu:
        draft.set("optimizer", "adamw_8bit", "on a CPU there is nothing to page")
