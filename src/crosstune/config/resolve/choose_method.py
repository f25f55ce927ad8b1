"""Resolve --train_type and the quantization options into method, quantizer and bits, and judge the learning rate by them."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import ADAPTER_METHODS, TRAIN_TYPE_PARTS
from crosstune.config.resolve.plan import Draft


def choose_method(draft: Draft) -> None:
    """Set the method, the quantizer and the bits per weight."""
    train_type = draft["train_type"]
    method, wanted = TRAIN_TYPE_PARTS[train_type]
    draft.method = method
    explicit = draft["quantization_backend"]
    if explicit == "none" or draft["no_4bit"]:
        wanted = "none"
    elif explicit != "auto":
        if wanted not in ("auto", "none", explicit):
            draft.refuse(
                f"--train_type {train_type} and --quantization_backend {explicit} contradict each other.",
                do=f"remove one of them, or use --train_type {'qlora' if method == 'lora' else method}",
            )
        wanted = explicit
    if wanted == "none":
        if draft["base_precision"] == "fp8" and draft.report.engine == "torch" and method == "lora":
            draft.quantizer, draft.n_bits = "fp8", 8
        return
    if method == "full":
        draft.refuse(
            "Full fine-tuning of a quantized base is not supported.",
            why=f"--train_type full updates every weight, --quantization_backend {wanted} freezes them.",
            do="use --train_type qlora, or remove --quantization_backend",
        )
    draft.quantizer, draft.n_bits = _fit_quantizer(draft, wanted), draft["n_bits"]


def _fit_quantizer(draft: Draft, wanted: str) -> str:
    report, bits, known = draft.report, draft["n_bits"], draft.facts.quantizers
    if wanted != "auto" and bits not in known[wanted].bits:
        # Replace a library that is missing on this machine, but not one that never supports these bits.
        draft.refuse(
            f"{wanted} does not support {bits}-bit weights.",
            do=f"use --n_bits {', '.join(map(str, known[wanted].bits))}, or --train_type qlora with "
            "--quantization_backend auto",
        )
        return wanted
    order = sorted(known.values(), key=lambda quantizer: quantizer.preference_for(report.name))
    able = [quantizer.name for quantizer in order if bits in report.quantizers.get(quantizer.name, ())]
    if not able:
        _refuse_bits(draft, wanted)
        return wanted
    used = wanted if wanted in able else able[0]
    if wanted == "mlx" != used and "quanto" in able:
        used = "quanto"  # group-wise integers, as in MLX
    if wanted == "auto":
        draft.set("quantization_backend", used, f"supports {bits} bits on {report.name}")
    elif used != wanted:
        if known[wanted].engine == "mlx" != report.engine:
            reason = "mlx quantization needs the MLX engine (--backend mlx)"
        else:
            reason = f"{wanted} does not support {bits} bits on {report.name}"
        draft.set("quantization_backend", used, reason, kind="change")
    sizes = known[used].group_sizes
    if sizes and draft["group_size"] not in sizes and not draft.is_asked("group_size"):
        draft.set("group_size", sizes[0], f"the size that {used} supports")
    if sizes and draft["group_size"] not in sizes:
        draft.refuse(
            f"{used} does not support group size {draft['group_size']}.",
            do=f"use --group_size {', '.join(map(str, sizes))}",
        )
    if report.name == "mps" and bits == 4:
        draft.warn("n_bits", "MPS lacks fast 4-bit kernels; training will be slow")
    if report.is_torch_cpu:
        draft.warn("n_bits", "quantization has limited support on a CPU; training will be slow")
    return used


def _refuse_bits(draft: Draft, wanted: str) -> None:
    """Add a problem for a number of bits that no available quantizer supports."""
    report, bits = draft.report, draft["n_bits"]
    offers = [f"{name} {'/'.join(map(str, widths))} bit" for name, widths in report.quantizers.items()]
    fitting = [
        quantizer
        for quantizer in draft.facts.quantizers.values()
        if quantizer.engine == report.engine and bits in quantizer.bits and wanted in ("auto", quantizer.name)
    ]
    ways = [
        "use --train_type lora"
        + (" without --quantization_backend" if draft["quantization_backend"] != "auto" else "")
    ]
    if offers:
        ways.insert(0, "choose an --n_bits from that list")
    if fitting and fitting[0].name not in report.quantizers:
        ways.insert(0, fitting[0].install_command)
    why = f"available: {'; '.join(offers)}." if offers else "no quantizer is available."
    draft.refuse(f"A {bits}-bit base is not supported on {report.name}.", why=why, do=", or ".join(ways))


@dataclass(frozen=True)
class Range:
    """Learning rates beyond which fine-tuning fails in practice, with a typical value."""

    lowest: float
    highest: float
    typical: float


_ADAM = (Range(1e-7, 5e-3, 2e-4), Range(1e-7, 1e-3, 2e-5))
_RANGES: dict[str, tuple[Range, Range]] = {
    # Every weight moves by the whole rate in each step of Lion.
    "lion": (Range(1e-8, 1e-3, 5e-5), Range(1e-8, 2e-4, 3e-6)),
    # Steps in proportion to the clipped gradient.
    "sgd": (Range(1e-3, 10, 0.3), Range(1e-4, 10, 0.03)),
    "adadelta": (Range(1e-2, 100, 1.0), Range(1e-2, 100, 1.0)),
}
"""Optimizer -> range for adapters, and for all other methods; adafactor is scaled like adamw."""


def default_rate(*, optimizer: str) -> float:
    """Return the default learning rate of full fine-tuning; the default of --lr is for adapters."""
    return _range(optimizer, "full").typical


def rate_warning(lr: float, *, optimizer: str, method: str) -> str | None:
    """Return the warning for a learning rate, or None."""
    found = _range(optimizer, method)
    for_what = f"for {method} with {optimizer}; {found.typical:g} is typical"
    if lr > found.highest:
        return f"{lr:g} is very high {for_what}. Above {found.highest:g} the loss rarely falls and may become NaN"
    if 0 < lr < found.lowest:
        return f"{lr:g} is very low {for_what}. Below {found.lowest:g} the weights hardly change"
    return None


def _range(optimizer: str, method: str) -> Range:
    of_adapters, of_weights = _RANGES.get(optimizer.removesuffix("_8bit"), _ADAM)
    return of_adapters if method in ADAPTER_METHODS else of_weights
