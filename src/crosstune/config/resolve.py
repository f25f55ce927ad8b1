"""Asked + machine -> plan: a pure function. Everything it changes is an Adjustment with a reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from crosstune.config.check_values import check_values
from crosstune.config.draft import Draft
from crosstune.config.idle_options import warn_without_effect
from crosstune.config.plan import TRAIN_TYPE_PARTS, Adjustment, Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.machine import BackendReport, Machine, choose_backend
from crosstune.core.memory import GIB, ModelShape, step_bytes
from crosstune.core.ranks import Ranks

QUANTIZER_ORDER = ("bnb", "hqq", "quanto", "mlx")
LIBRARY_BITS: Mapping[str, tuple[int, ...]] = {"bnb": (4, 8), "hqq": (8, 4, 3, 2, 1), "quanto": (8, 4, 2)}
MPS_QUANTIZER_ORDER = ("bnb", "quanto", "hqq")
GROUP_SIZES = {"mlx": (32, 64, 128)}
"""Of quantizers that have only some; the others take any."""
USABLE_MEMORY = 0.9
USABLE_MEMORY_ON_MPS = 0.7  # the high watermark that the backend sets
CONTEXT_WITHOUT_FLASH = 2048
BF16_WORTH_IT = 1.3


def resolve(
    config: Config,
    *,
    machine: Machine,
    collectives: Mapping[str, str | None],
    preference: Sequence[str],
    shape: ModelShape | None = None,
    longest_row: int | None = None,
    installs: Mapping[str, str] | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """The plan for this machine, or one ConfigError with everything that stands in its way.

    `collectives`, `preference` and `installs` come from the backend files: what each backend's devices talk through,
    the order in which `auto` tries them, and how to get one that is not there. `longest_row` is the longest example of the data, once it is known:
    memory is then estimated for it and not for the whole context. `ranks` is there when several processes were started.
    """
    draft = _choose_backend(config, machine, preference, installs or {})
    method, quantizer, n_bits = _choose_method(draft)
    if method == "llama_pro" and draft["llama_pro_path"]:
        draft.set("model_name", draft["llama_pro_path"], "llama_pro_path names it", kind="choice")
    _fit_precision(draft)
    world_size, collective = _fit_world(draft, collectives, ranks)
    _fit_attention(draft, shape)
    _fit_optimizer(draft)
    if draft["low_memory"] and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, "low_memory recomputes activations")
    sharing = 1
    if draft.report.engine == "mlx":
        sharing = ranks.local_size if ranks is not None else world_size
    estimate = _fit_memory(
        draft, shape, longest_row, method=method, quantizer=quantizer, n_bits=n_bits, sharing=sharing
    )
    check_values(draft, method)
    warn_without_effect(draft, method=method, quantizer=quantizer, n_bits=n_bits, world_size=world_size)
    if config.strict:
        draft.problems += [_forbidden(a) for a in draft.adjustments if a.kind == "change"]
    raise_all(draft.problems)
    return Plan(
        config=replace(config, **draft.values),
        machine=machine,
        backend=draft.report,
        method=method,
        quantizer=quantizer,
        n_bits=n_bits,
        world_size=world_size,
        collective=collective,
        estimated_bytes=estimate,
        adjustments=tuple(draft.adjustments),
    )


def _forbidden(adjustment: Adjustment) -> UserError:
    return UserError(
        f"{adjustment.option} cannot stay {adjustment.asked}.",
        why=f"{adjustment.reason}; --strict forbids to use {adjustment.used} instead.",
        do=f"ask for --{adjustment.option} {adjustment.used}, or leave --strict out",
    )


def _install_words(backend: str, installs: Mapping[str, str]) -> str:
    words = installs.get(backend, "").rstrip(".")
    return f"{words}; or " if words else ""


def _choose_backend(
    config: Config, machine: Machine, preference: Sequence[str], installs: Mapping[str, str]
) -> Draft:
    if config.backend == "auto":
        name = choose_backend(machine, preference=preference)
        draft = Draft(asked=config, machine=machine, report=machine.backends[name])
        draft.set("backend", name, "the first that is available here", kind="choice")
        if name == "cpu":
            draft.warn("backend", "training on a CPU is very slow: use it for small models and for tests")
        return draft
    report = machine.backends.get(config.backend)
    if report is None or not report.available:
        reason = report.reason if report else f"{machine.name} has no report on it."
        raise UserError(
            f"Backend '{config.backend}' is not available",
            why=reason,
            do=f"{_install_words(config.backend, installs)}use --backend auto, or one that is available here: "
            f"{', '.join(machine.available())}",
        )
    draft = Draft(asked=config, machine=machine, report=report)
    if report.name == "cpu":
        draft.warn("backend", "training on a CPU is very slow: use it for small models and for tests")
    return draft


def _choose_method(draft: Draft) -> tuple[str, str, int]:
    """Method, quantizer and bits: what the one word of --train_type and the quantizer options add up to."""
    train_type = draft["train_type"]
    method, wanted = TRAIN_TYPE_PARTS[train_type]
    explicit = draft["quantization_backend"]
    if explicit == "none" or draft["no_4bit"]:
        wanted = "none"
    elif explicit != "auto":
        if wanted in ("hqq", "bnb") and explicit != wanted:
            draft.problems.append(
                UserError(
                    f"--train_type {train_type} and --quantization_backend {explicit} contradict each other.",
                    do=f"leave one out, or use --train_type {'qlora' if method == 'lora' else method}",
                )
            )
        wanted = explicit
    if wanted == "none":
        return method, "none", 16
    if method == "full":
        draft.problems.append(
            UserError(
                "A quantized base cannot be trained as a whole.",
                why=f"--train_type full updates every weight, --quantization_backend {wanted} freezes them.",
                do="use --train_type qlora, or leave --quantization_backend out",
            )
        )
    return method, _fit_quantizer(draft, wanted), draft["n_bits"]


def _fit_quantizer(draft: Draft, wanted: str) -> str:
    report, bits = draft.report, draft["n_bits"]
    if bits not in LIBRARY_BITS.get(wanted, (bits,)):
        # Another library is for one that is missing on a machine, not for what it never had.
        draft.problems.append(
            UserError(
                f"{wanted} has no {bits} bits.",
                do=f"use --n_bits {', '.join(map(str, LIBRARY_BITS[wanted]))}, or --train_type qlora with "
                "--quantization_backend auto",
            )
        )
        return wanted
    order = MPS_QUANTIZER_ORDER if report.name == "mps" else QUANTIZER_ORDER
    able = [name for name in order if bits in report.quantizers.get(name, ())]
    if not able:
        offers = [f"{name} {'/'.join(map(str, widths))} bit" for name, widths in report.quantizers.items()]
        have = f"what runs here: {'; '.join(offers)}." if offers else "no quantizer runs here."
        if report.engine == "mlx":
            do = "choose an --n_bits from that list, or --train_type lora"
        else:
            do = "pip install 'crosstune[bnb]', choose an --n_bits from that list, or use --train_type lora"
        draft.problems.append(
            UserError(f"A base of {bits} bits is not possible on {report.name} here.", why=have, do=do)
        )
        return wanted
    used = wanted if wanted in able else able[0]
    if wanted == "auto":
        draft.set("quantization_backend", used, f"runs with {bits} bits on {report.name}")
    elif used != wanted:
        if wanted == "mlx":
            reason = "mlx quantization belongs to the MLX engine (--backend mlx)"
        else:
            reason = f"{wanted} does not run with {bits} bits on {report.name} here"
        draft.set("quantization_backend", used, reason, kind="change")
    sizes = GROUP_SIZES.get(used)
    if sizes is not None and draft["group_size"] not in sizes:
        draft.problems.append(
            UserError(
                f"{used} has no groups of {draft['group_size']} weights.",
                do=f"use --group_size {', '.join(map(str, sizes))}",
            )
        )
    if report.name == "mps" and bits == 4:
        draft.warn("n_bits", "4-bit arithmetic has no fast kernels on MPS: expect it to be slow")
    if report.name == "cpu":
        draft.warn("n_bits", "quantization has limited support on a CPU: expect it to be slow")
    return used


def _fit_precision(draft: Draft) -> None:
    asked, report = draft["precision"], draft.report
    if asked == "auto":
        used, reason = _best_precision(report)
        draft.set("precision", used, reason, kind="choice")
        return
    dtype = asked.split("_")[0]
    if dtype in report.dtypes:
        if report.engine == "mlx" and dtype != asked:
            draft.set("precision", dtype, "MLX has no autocast; what is trained is kept in fp32 beside it")
        return
    title = report.name.upper()
    words = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    for other in ("fp16", "bf16", "fp32"):
        if other in report.dtypes:
            keeps = asked.endswith("_autocast") and other != "fp32" and report.engine != "mlx"
            suffix = "_autocast" if keeps else ""
            draft.set(
                "precision", other + suffix, f"{title} backend doesn't support {words} here", kind="change"
            )
            return
    draft.problems.append(
        UserError(f"No number format works on {report.name} here.", why="see: crosstune doctor")
    )


def _best_precision(report: BackendReport) -> tuple[str, str]:
    if report.device == "cpu":
        if "bf16" in report.dtypes and report.bf16_speedup >= BF16_WORTH_IT:
            return "bf16_autocast", f"bf16 products ran {report.bf16_speedup:.1f}x as fast as fp32 here"
        return "fp32", "bf16 is not faster on this CPU"
    if "bf16" in report.dtypes:
        return "bf16", "bf16 works here; what is trained is kept in fp32"
    if "fp16" in report.dtypes and report.name != "mps":
        short = "fp16" if report.engine == "mlx" else "fp16_autocast"
        return short, "no bf16 here; fp16 with loss scaling"
    return (
        "fp32",
        "no bf16 here, and fp16 is prone to overflow" if "fp16" in report.dtypes else "nothing shorter works",
    )


def _fit_world(
    draft: Draft, collectives: Mapping[str, str | None], ranks: Ranks | None
) -> tuple[int, str | None]:
    report, asked = draft.report, draft["world_size"]
    num_devices = max(1, len(report.devices))
    world_size = 1 if asked == -1 else asked
    if ranks is not None:
        world_size = _fit_ranks(draft, ranks)
    elif asked == -1 and num_devices > 1 and report.name != "cpu" and report.engine != "mlx":
        draft.set("world_size", 1, f"one of {num_devices} devices; training on several is not built yet")
    if report.engine == "mlx":
        if world_size > 1 and (ranks is None or ranks.local_size > 1):
            draft.warn(
                "world_size",
                "MLX processes on one machine share its GPU: good for tests; to be faster, start one on each of "
                "several machines with mlx.launch",
            )
    elif report.name != "cpu" and world_size > num_devices:
        plural = "device" if num_devices == 1 else "devices"
        draft.set("world_size", num_devices, f"{report.name} has {num_devices} {plural} here")
        world_size = num_devices
    collective = collectives.get(report.name)
    wanted = draft["distributed_backend"]
    offers = () if report.engine == "mlx" else report.collectives  # MLX has others; only its ring is built
    if wanted not in ("auto", collective) and wanted not in offers:
        draft.set("distributed_backend", collective or "auto", f"{report.name} has no {wanted}")
    elif wanted != "auto":
        collective = wanted
    return world_size, collective if world_size > 1 else None


def _fit_ranks(draft: Draft, ranks: Ranks) -> int:
    """As many as were started."""
    report, asked = draft.report, draft["world_size"]
    if report.engine != ranks.engine:
        draft.problems.append(
            UserError(
                f"{ranks.size} {ranks.engine} processes were started, and --backend {report.name} is not for them.",
                do=f"use --backend {ranks.engine}, or start one process without mlx.launch",
            )
        )
    if asked == -1:
        draft.set("world_size", ranks.size, "so many processes were started", kind="choice")
    elif asked != ranks.size:
        draft.problems.append(
            UserError(
                f"--world_size {asked} was asked for, and {ranks.size} processes were started.",
                do=f"use --world_size {ranks.size}, or start {asked}",
            )
        )
    return ranks.size


def _fit_attention(draft: Draft, shape: ModelShape | None) -> None:
    # MLX has one fused attention of its own; asking it for flash attention asks for that.
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
        draft.set("context_length", shape.max_context, f"the model was made for {shape.max_context} tokens")


def _fit_optimizer(draft: Draft) -> None:
    optimizer, report = draft["optimizer"], draft.report
    if optimizer.startswith("fused_") and report.name not in ("cuda", "rocm", "cpu", "mps", "xpu"):
        draft.set("optimizer", optimizer.removeprefix("fused_"), f"no fused optimizer on {report.name}")
    if optimizer.endswith("_8bit") and (report.name in ("mps", "mlx") or "bnb" not in report.quantizers):
        draft.set(
            "optimizer", "adamw", f"no 8-bit optimizer on {report.name} here; it comes with bitsandbytes"
        )
    elif optimizer == "paged_adamw_8bit" and report.name == "cpu":
        draft.set("optimizer", "adamw_8bit", "host memory needs no paging")


def _fit_memory(
    draft: Draft,
    shape: ModelShape | None,
    longest_row: int | None,
    *,
    method: str,
    quantizer: str,
    n_bits: int,
    sharing: int,
) -> int | None:
    """Make the step fit by changes that keep the maths: recompute activations, then smaller micro-batches.

    `sharing` is the number of processes that use the same memory.
    """
    if shape is None:
        return None
    usable = USABLE_MEMORY_ON_MPS if draft.report.name == "mps" else USABLE_MEMORY
    limit = int(draft.report.memory_total_bytes * usable / sharing)

    def estimate() -> int:
        precision = draft["precision"]
        full_width = precision == "fp32" or precision.endswith("_autocast")
        return step_bytes(
            shape,
            method=method,
            bits=n_bits if quantizer != "none" else 32 if full_width else 16,
            rank=draft["lora_rank"],
            batch=draft["batch_size"],
            context=min(draft["context_length"], longest_row or draft["context_length"]),
            checkpointing=draft["use_gradient_checkpointing"],
            compute_bits=32 if precision == "fp32" else 16,
        )

    need = estimate()
    if not limit:
        return need
    why = f"the step is estimated at {need / GIB:.1f} GiB and {draft.report.name} has {limit / GIB:.1f} GiB to use"
    if need > limit and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, why)
        need = estimate()
    batch, accumulation = draft["batch_size"], draft["gradient_accumulation_steps"]
    for smaller in (size for size in range(batch - 1, 0, -1) if (batch * accumulation) % size == 0):
        if need <= limit:
            break
        draft.set("batch_size", smaller, why)
        draft.set("gradient_accumulation_steps", batch * accumulation // smaller, "keeps the rows of a step")
        need = estimate()
    if need > limit:
        draft.warn(
            "batch_size",
            f"one row is still estimated at {need / GIB:.1f} GiB of {limit / GIB:.1f} GiB; it may run out of memory: "
            "use --train_type qlora, a shorter --context_length or a smaller model",
        )
    return need
