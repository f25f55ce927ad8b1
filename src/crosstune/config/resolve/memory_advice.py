"""Suggest options that reduce the memory of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from crosstune.config.conditions import ADAPTER_METHODS, work_of_rows
from crosstune.config.load import backend_variables
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import BackendSpec, backend_specs
from crosstune.core.out_of_memory import EVALUATING, GENERATING, LOADING, OutOfMemory
from crosstune.estimate.machine import BackendReport

Need = Literal["weights", "forward", "step"]
"""The part that does not fit: the weights, a forward pass, or a training step."""
SHORT_ROW = 128
"""Do not suggest shortening rows of at most this many tokens."""
SMALL_RANK = 8
"""The smallest rank of adapters to suggest."""
_QUANTIZED = {
    "lora": ("qlora",),
    "dora": ("hqq_dora", "bnb_dora"),
    "llama_pro": ("hqq_llama_pro", "bnb_llama_pro"),
}
"""Method -> train types with a quantized base."""


class Fits(Protocol):
    """Return True if a step is estimated to fit, with changed fields of its `Step` or with more memory."""

    def __call__(self, fields: Mapping[str, Any], *, more_memory: float = 1.0) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Changes that save memory, least intrusive first."""

    resumable: tuple[str, ...]
    """Changes that keep the run resumable."""
    new_run: tuple[str, ...]
    """Changes that need a new run."""

    def sentence(self) -> str:
        return f"use {_either((*self.resumable, *self.new_run))}"

    def sentence_after_failure(self) -> str:
        """Return the advice for a failed run that may have checkpoints."""
        anew = f"start a new run with {_either(self.new_run)}"
        return f"continue with {_either(self.resumable)}; or {anew}" if self.resumable else anew


def advise(
    options: Mapping[str, Any],
    *,
    report: BackendReport,
    spec: BackendSpec,
    method: str,
    quantizer: str,
    environment: Mapping[str, str],
    need: Need = "step",
    longest_row: int | None = None,
    fits: Fits | None = None,
) -> Advice:
    """Return changes to the resolved `options` that reduce memory; `longest_row` is in tokens, if known.

    With `fits`, return only changes that suffice by the estimate.
    """
    resumable: list[str] = []
    batch, accumulation = options["batch_size"], options["gradient_accumulation_steps"]
    if need != "weights" and batch > 1:
        smaller = batch // 2 if batch % 2 == 0 else 1
        more = accumulation * (batch // smaller)
        resumable.append(
            f"--batch_size {smaller} --gradient_accumulation_steps {more} (the same rows per step)"
        )
    if need == "step":
        if not options["use_gradient_checkpointing"] and (fits is None or fits({"checkpointing": True})):
            resumable.append("--use_gradient_checkpointing")
        # Releases torch's cache, which the estimates exclude and a CPU does not have.
        resumable += [] if options["low_memory"] or report.is_torch_cpu or fits else ["--low_memory"]
    share = spec.usable_share(environment)
    can_raise = spec.memory_share_variable and share is not None and share < 1
    if can_raise and (fits is None or (share and fits({}, more_memory=1 / share))):
        resumable.append(
            f"{spec.memory_share_variable} above {share:g} (an environment variable) if other programs can spare the memory"
        )
    short = next((name for name in ("bf16", "fp16") if name in report.dtypes), None)
    is_wide = options["precision"] == "fp32" and not report.is_torch_cpu
    changes: dict[str, Mapping[str, Any]] = {}
    if short is not None and is_wide:
        changes[f"--precision {short}"] = {"compute_bits": 16, "weight_bits": 16}
    changes |= _smaller_weights(options, report, method=method, quantizer=quantizer)
    new_run = [text for text, fields in changes.items() if fits is None or fits(fields)]
    answers = work_of_rows(options).num_answers
    row = min(
        options["context_length"], -(-longest_row // answers) if longest_row else options["context_length"]
    )
    if fits is not None:
        new_run += [f"--lora_rank {SMALL_RANK}"] * (
            method in ADAPTER_METHODS and options["lora_rank"] > SMALL_RANK and fits({"rank": SMALL_RANK})
        )
        shorter = [row >> halvings for halvings in range(1, row.bit_length()) if row >> halvings >= SHORT_ROW]
        new_run += [
            f"--context_length {tokens}" for tokens in shorter if fits({"context": answers * tokens})
        ][:1]
    elif need != "weights" and row > SHORT_ROW:
        new_run.append(f"a --context_length below {row}")
    return Advice(resumable=tuple(resumable), new_run=(*new_run, "a smaller model"))


def quantized_train_types(method: str, report: BackendReport) -> list[str]:
    """Return the train types with this method on a quantized base that the backend supports."""
    if report.engine != "torch" and method != "lora":
        return []
    # Quantizers are probed only if the run requested quantization.
    return [
        name
        for name in _QUANTIZED[method]
        if name == "qlora" or not report.quantizers or name.partition("_")[0] in report.quantizers
    ]


def smaller_optimizer(optimizer: str, report: BackendReport) -> str | None:
    """Return the optimizer with an 8-bit state that replaces one, if the backend has it."""
    able = report.name in ("cuda", "rocm", "xpu", "cpu") and (
        "bnb" in report.quantizers or not report.quantizers
    )
    if not able or optimizer.endswith("_8bit"):
        return None
    return "lion_8bit" if optimizer == "lion" else "adamw_8bit"


def _smaller_weights(
    options: Mapping[str, Any], report: BackendReport, *, method: str, quantizer: str
) -> dict[str, Mapping[str, Any]]:
    """Return the flags that make the weights smaller, with the fields of `Step` that they change."""
    adapters = {"method": "lora" if method == "full" else method}
    found: dict[str, Mapping[str, Any]] = {}
    if method == "full":
        smaller = (
            smaller_optimizer(options["optimizer"], report) if options["world_size"] in (-1, 1) else None
        )
        found = {f"--optimizer {smaller}": {"optimizer": smaller}} if smaller is not None else {}
        found["--train_type lora"] = adapters
    if quantizer == "none":
        quantized = {**adapters, "quantizer": next(iter(report.quantizers), "bnb"), "n_bits": 4}
        names = quantized_train_types(adapters["method"], report)[:1]
        allowed = " --no_4bit false" * bool(options["no_4bit"])
        allowed += " --quantization_backend auto" * (options["quantization_backend"] == "none")
        return found | {f"--train_type {name}{allowed}": quantized for name in names}
    fewer = [bits for bits in report.quantizers.get(quantizer, ()) if bits < options["n_bits"] and bits >= 4]
    return found | ({f"--n_bits {max(fewer)}": {"n_bits": max(fewer)}} if fewer else {})


def _either(changes: tuple[str, ...]) -> str:
    return changes[0] if len(changes) == 1 else f"{', '.join(changes[:-1])} or {changes[-1]}"


_NEEDS: dict[str, Need] = {LOADING: "weights", EVALUATING: "forward", GENERATING: "forward"}


def with_advice(error: OutOfMemory, plan: Plan, *, longest_row: int | None) -> OutOfMemory:
    """Return the error with advice for this run; `longest_row` is in tokens."""
    advice = advise(
        plan.config.options(),
        report=plan.backend,
        spec=backend_specs()[plan.backend.name],
        method=plan.method,
        quantizer=plan.quantizer,
        environment=backend_variables(),
        need=_NEEDS.get(error.doing, "step"),
        longest_row=longest_row,
    )
    return error.with_advice(advice.sentence_after_failure())
