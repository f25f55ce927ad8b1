"""Resolve a request and the facts into a plan. This is a pure function; each change is an Adjustment with a reason."""

from __future__ import annotations

from dataclasses import replace

from crosstune.config.check_values import check_values
from crosstune.config.choose_method import choose_method
from crosstune.config.conditions import Decided
from crosstune.config.draft import Draft
from crosstune.config.facts import Facts
from crosstune.config.fit_attention import fit_attention
from crosstune.config.fit_memory import fit_memory
from crosstune.config.fit_precision import fit_precision
from crosstune.config.idle_options import warn_without_effect
from crosstune.config.plan import Adjustment, Plan
from crosstune.config.schema import Config, option_list
from crosstune.config.train_types import TRAIN_TYPE_PARTS
from crosstune.core.errors import UserError, raise_all
from crosstune.core.machine import auto_reason, choose_backend
from crosstune.core.ranks import Ranks
from crosstune.core.usable_memory import usable_bytes

EIGHT_BIT_OPTIMIZERS_FROM = "bnb"
"""The quantizer whose library has the 8-bit optimizers."""
FUSED_OPTIMIZERS_ON = ("cuda", "cpu", "mps", "xpu")
"""Devices of torch; ROCm's is called cuda."""


def resolve(config: Config, facts: Facts) -> Plan:
    """Return the plan for these facts; raise one ConfigError with all problems."""
    config = _with_stored_quantization(config, facts)
    draft = _choose_backend(config, facts)
    _mention_names(draft)
    _use_recipe_defaults(draft)
    method, quantizer, n_bits = choose_method(draft)
    if method == "llama_pro" and draft["llama_pro_path"]:
        draft.set("model_name", draft["llama_pro_path"], "llama_pro_path names it", kind="choice")
    fit_precision(draft)
    world_size, collective = _fit_world(draft)
    fit_attention(draft)
    _fit_optimizer(draft)
    if draft["low_memory"] and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, "low_memory recomputes activations")
    usable = usable_bytes(
        facts.machine, draft.report, facts.backends[draft.report.name], environment=facts.environment
    ) // _num_sharing(draft, world_size)
    estimate = fit_memory(draft, method=method, quantizer=quantizer, n_bits=n_bits, limit=usable)
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
        usable_bytes=usable,
        adjustments=tuple(draft.adjustments),
    )


def _mention_names(draft: Draft) -> None:
    """Record the options that were set under another trainer's name."""
    for option, name in draft.asked.renamed.items():
        value = getattr(draft.asked, option)
        draft.adjustments.append(
            Adjustment(option=option, asked=value, used=value, reason=f"given as {name}", kind="name")
        )


def _use_recipe_defaults(draft: Draft) -> None:
    for option, value in draft.facts.recipe_defaults.items():
        if not draft.is_asked(option):
            draft.set(option, value, f"the default of the recipe {draft['recipe']}", kind="choice")


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
        title = draft.facts.backends[report.name].title
        used = collective or "auto"
        draft.set(
            "distributed_backend", used, f"{wanted} does not run on {report.name} ({title}), {used} does"
        )
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
