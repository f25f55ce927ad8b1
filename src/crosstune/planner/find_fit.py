"""Search for the mildest changes of options with which a step fits into memory, and for the longest row that fits."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.fit_compute import prefers_fast
from crosstune.config.resolve.memory_advice import (
    SHORT_ROW,
    SMALL_RANK,
    quantized_train_types,
    smaller_optimizer,
)
from crosstune.config.resolve.plan import Plan
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.fast_layers import HOST_SHARE, stream_bytes
from crosstune.estimate.machine import held_score_bits
from crosstune.estimate.memory import GIB, step_bytes
from crosstune.estimate.model_shape import ModelShape, Step

SHARDS = (2, 4, 8, 16, 32, 64)
_RECOMPUTE, _OFFLOAD, _OPTIMIZER, _PRECISION, _RANK, _QUANTIZE, _ADAPTERS, _SHORTER = 1, 3, 3, 4, 7, 8, 9, 16
"""The cost of a change: time first, then rounding, then smaller adapters, then a different method, and last shorter rows
(halved each time)."""

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Changes with which a step fits."""

    text: str
    """The changed flags and the memory they need, or the sentence that no option helps."""
    command: str | None
    """The whole command; None if no option of one machine helps."""


@dataclass(frozen=True)
class _Change:
    cost: int
    options: Options
    step: Mapping[str, Any]
    """The changed fields of the step."""


def find_fit(plan: Plan) -> Fit | None:
    """Return the cheapest changes with which the step is predicted to fit; None if it fits already."""
    fitted = plan.fitted
    assert fitted is not None
    if not plan.usable_bytes or fitted.estimated_bytes <= plan.usable_bytes:
        return None
    factor = fitted.estimated_bytes / max(1, fitted.parts.total)
    for changes in sorted(_sets(plan, fitted.step), key=lambda found: sum(each.cost for each in found)):
        options: dict[str, Any] = {}
        step = fitted.step
        for change in changes:
            options |= change.options
            step = replace(step, **change.step)
        step = replace(step, fast=step.fast and _stays_fast(plan, step))
        need = int(step_bytes(fitted.shape, step) * factor)
        if need <= plan.usable_bytes:
            return make_fit(plan, options, need)
    return Fit(text=_more_devices(fitted.shape, fitted.step, plan, factor=factor), command=None)


def make_fit(plan: Plan, options: Options, need: int) -> Fit:
    """Return the changed flags with the memory they need, and the whole command."""
    words = ["crosstune", "train", *_flags(plan.config.options_asked() | dict(options))]
    return Fit(text=f"{' '.join(_flags(options))} ({need / GIB:.1f} GiB)", command=shlex.join(words))


def saving_options(plan: Plan, step: Step) -> tuple[dict[str, Any], Step]:
    """Return the options that save activations at the cost of time alone, and the step with them."""
    options: dict[str, Any] = {}
    for change in (*_recompute(step), *_offload(plan, step)):
        options |= change.options
        step = replace(step, **change.step)
    return options, step


def flags_text(options: Options) -> str:
    return " ".join(_flags(options))


def _sets(plan: Plan, step: Step) -> Iterator[list[_Change]]:
    """Yield the sets of changes: at most one from each group."""
    groups = [_batch(step), _recompute(step), _offload(plan, step), _optimizer(plan, step)]
    groups += [_precision(plan, step), _rank(step), _weights(plan, step), _context(step)]
    for chosen in itertools.product(*([None, *group] for group in groups)):
        if found := [change for change in chosen if change is not None]:
            yield found


def _batch(step: Step) -> list[_Change]:
    if step.batch == 1:
        return []
    rows = step.batch * step.num_micro_batches
    options = {"batch_size": 1, "gradient_accumulation_steps": rows}
    return [_Change(0, options, {"batch": 1, "num_micro_batches": rows})]


def _recompute(step: Step) -> list[_Change]:
    if step.checkpointing or (step.fast and step.recomputes_by_memory):
        return []
    return [_Change(_RECOMPUTE, {"use_gradient_checkpointing": True}, {"checkpointing": True})]


def _offload(plan: Plan, step: Step) -> list[_Change]:
    report = plan.backend
    if step.offloads_activations or report.engine != "torch":
        return []
    if report.device == "cpu" or report.unified_memory:
        return []
    if step.fast:  # only the inputs of recomputed layers are worth the way to the host
        recomputed = {"use_gradient_checkpointing": True, "use_activation_cpu_offload": True}
        return [_Change(_OFFLOAD, recomputed, {"checkpointing": True, "offloads_activations": True})]
    return [_Change(_OFFLOAD, {"use_activation_cpu_offload": True}, {"offloads_activations": True})]


def _optimizer(plan: Plan, step: Step) -> list[_Change]:
    """Return an 8-bit optimizer if all weights are trained."""
    smaller = smaller_optimizer(step.optimizer, plan.backend)
    if step.method != "full" or smaller is None or step.num_shards > 1:
        return []
    return [_Change(_OPTIMIZER, {"optimizer": smaller}, {"optimizer": smaller})]


def _precision(plan: Plan, step: Step) -> list[_Change]:
    """Return a 16-bit dtype for the weights and the computation."""
    report = plan.backend
    dtype = next((name for name in ("bf16", "fp16") if name in report.dtypes), None)
    if dtype is None or (step.compute_bits == 16 and step.weight_bits == 16):
        return []
    shares = plan.fitted is not None and plan.fitted.shape.keys < plan.fitted.shape.queries
    scores = held_score_bits(
        report,
        flash=plan.config.use_flash_attention,
        compute_bits=16,
        shares_keys=shares and not plan.config.packing,
        has_sinks=plan.fitted is not None and plan.fitted.shape.has_sinks,
    )
    changed = {"compute_bits": 16, "weight_bits": 16, "score_bits": scores}
    return [_Change(_PRECISION, {"precision": dtype}, changed)]


def _rank(step: Step) -> list[_Change]:
    if step.method not in ADAPTER_METHODS or step.rank <= SMALL_RANK:
        return []
    return [_Change(_RANK, {"lora_rank": SMALL_RANK}, {"rank": SMALL_RANK})]


def _weights(plan: Plan, step: Step) -> list[_Change]:
    """Return a quantized base, fewer bits, or adapters in place of full fine-tuning."""
    report = plan.backend
    if step.quantizer != "none":
        able = report.quantizers.get(step.quantizer, ()) if step.quantizer != "fp8" else ()
        fewer = [bits for bits in able if 4 <= bits < plan.n_bits]
        return [_Change(_QUANTIZE, {"n_bits": bits}, {"n_bits": bits}) for bits in fewer[-1:]]
    method = "lora" if step.method == "full" else step.method
    found = [_Change(_ADAPTERS, {"train_type": "lora"}, {"method": "lora"})] if step.method == "full" else []
    order = sorted(read_quantizers().values(), key=lambda each: each.preference_for(report.name))
    able_names = [each.name for each in order if 4 in report.quantizers.get(each.name, ())]
    for train_type in quantized_train_types(method, report)[:1]:
        named = train_type.partition("_")[0]
        quantizer = named if named in report.quantizers else (able_names or ["bnb"])[0]
        changed = {"method": method, "quantizer": quantizer, "n_bits": 4}
        cost = _QUANTIZE + (_ADAPTERS if step.method == "full" else 0)
        options: dict[str, Any] = {"train_type": train_type}
        asked = plan.config.options_asked()
        options |= {"n_bits": 4} if "n_bits" in asked else {}
        options |= {"quantization_backend": "auto"} if asked.get("quantization_backend") == "none" else {}
        options |= {"no_4bit": False} if asked.get("no_4bit") else {}
        found.append(_Change(cost, options, changed))
    return found


def _context(step: Step) -> list[_Change]:
    found, context, cost = [], step.context // 2, _SHORTER
    while context >= SHORT_ROW:
        found.append(_Change(cost, {"context_length": context // step.answers}, {"context": context}))
        context, cost = context // 2, cost + _SHORTER
    return found


def _stays_fast(plan: Plan, step: Step) -> bool:
    precision = plan.precision
    if step.weight_bits == 16 and precision.endswith("_autocast"):
        precision = precision.removesuffix("_autocast")
    hidden = plan.fitted.shape.hidden if plan.fitted is not None else 0
    return plan.config.kernels == "fast" and (
        "kernels" in plan.config.sources
        or prefers_fast(plan.backend, precision, quantizer=step.quantizer, hidden=hidden)
    )


def _flags(options: Options) -> list[str]:
    """Return the options as words of a command line."""
    words: list[str] = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None:
            words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return words


def _more_devices(shape: ModelShape, step: Step, plan: Plan, *, factor: float) -> str:
    """Say how many devices fit the sharded model, or that no option helps."""
    if plan.engine == "torch" and plan.backend.name in ("cuda", "rocm", "xpu"):
        small = replace(step, batch=1, checkpointing=True, fast=False)  # the fast layers need whole weights
        for count in SHARDS:
            if count > step.num_shards:
                need = int(step_bytes(shape, replace(small, num_shards=count)) * factor)
                if need <= plan.usable_bytes:
                    return (
                        f"{count} such devices with --sharding_strategy full_shard --batch_size 1 "
                        f"--use_gradient_checkpointing ({need / GIB:.1f} GiB each)"
                    )
    return "no option: use a smaller model or a larger machine"


STEP_TOKENS = 256
MOST_TOKENS = 2**26


@dataclass(frozen=True, kw_only=True)
class LongestRow:
    """The longest row of a plan, one row at a time."""

    as_planned: int
    """Tokens with the options of the plan; 0 if none fits."""
    with_savings: int
    """Tokens with `options` too."""
    options: dict[str, Any]
    """Options that save memory of long rows without changing the result; empty if the plan has them all."""
    trained_context: int | None
    """The longest row that the model's positions were trained for or are scaled to; None if unknown."""
    is_scaled: bool
    """True with --rope_scaling."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_longest(plan: Plan) -> LongestRow | None:
    """Return the longest row; None if the sizes of the model are unknown."""
    fitted = plan.fitted
    if fitted is None or not plan.usable_bytes:
        return None
    factor = fitted.estimated_bytes / max(1, fitted.parts.total)
    shape, devices = fitted.shape, max(1, len(plan.backend.devices))
    on_host = shape.num_layers * shape.hidden * stream_bytes(fitted.step)  # the inputs of recomputed layers
    host = int(HOST_SHARE * plan.machine.memory_total_bytes / devices)
    options, saving = saving_options(plan, fitted.step)

    def longest(step: Step) -> int:
        def fits(tokens: int) -> bool:
            supervised = tokens if step.supervised is None else step.supervised
            own = -(-tokens // step.row_parts)
            row = replace(step, batch=1, context=own, supervised=min(own, supervised))
            if step.offloads_activations and tokens * on_host > host:
                return False
            return step_bytes(shape, row) * factor <= plan.usable_bytes

        low, high = 0, STEP_TOKENS
        while high <= MOST_TOKENS and fits(high):
            low, high = high, 2 * high
        while high - low > STEP_TOKENS:
            middle = (low + high) // (2 * STEP_TOKENS) * STEP_TOKENS
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    as_planned = longest(fitted.step)
    with_savings = longest(saving) if options else as_planned
    if with_savings <= as_planned:
        options, with_savings = {}, as_planned
    return LongestRow(
        as_planned=as_planned,
        with_savings=with_savings,
        options=options,
        trained_context=shape.max_context or None,
        is_scaled=plan.config.rope_scaling != "none",
    )
