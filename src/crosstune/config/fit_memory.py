"""Fit a training step into memory by changes that do not change the result."""

from __future__ import annotations

from pathlib import PurePath

from crosstune.config.draft import Draft
from crosstune.core.expanded_name import read_expanded_name
from crosstune.core.memory import GIB, expand_shape, step_bytes

USABLE_MEMORY = 0.9
USABLE_MEMORY_ON_MPS = 0.7  # the high watermark set in backends/mps.py


def fit_memory(
    draft: Draft,
    *,
    method: str,
    quantizer: str,
    n_bits: int,
    sharing: int,
) -> int | None:
    """Turn on activation checkpointing, then reduce the micro-batch, until the step fits; return its estimated bytes.

    `sharing` is the number of processes that use the same memory.
    """
    shape, longest_row = draft.facts.shape, draft.facts.longest_row
    if shape is None:
        return None
    num_new = _num_new_blocks(draft, method)
    if num_new and not draft["llama_pro_path"]:
        shape = expand_shape(shape, num_new)
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
            num_new_blocks=num_new,
        )

    need = estimate()
    if not limit:
        return need
    why = f"the step is estimated at {need / GIB:.1f} GiB and {draft.report.name} has {limit / GIB:.1f} GiB to use"
    if need > limit and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, why)
        need = estimate()
    batch, accumulation = draft["batch_size"], draft["gradient_accumulation_steps"]
    for smaller in _smaller_batches(batch, accumulation):
        if need <= limit:
            break
        draft.set("batch_size", smaller, why)
        draft.set(
            "gradient_accumulation_steps",
            batch * accumulation // smaller,
            "keeps the number of rows per step",
        )
        need = estimate()
    if need > limit:
        draft.warn(
            "batch_size",
            f"one row is still estimated at {need / GIB:.1f} GiB of {limit / GIB:.1f} GiB; it may not fit into memory: "
            "use --train_type qlora, a shorter --context_length or a smaller model",
        )
    return need


def _smaller_batches(batch: int, accumulation: int) -> list[int]:
    """Return the batch sizes below `batch` that divide the rows of a step, largest first."""
    divisors = {1}
    for prime in _prime_factors(batch) + _prime_factors(accumulation):
        divisors |= {prime * divisor for divisor in divisors if prime * divisor < batch}
    return sorted(divisors - {batch}, reverse=True)


def _prime_factors(number: int) -> list[int]:
    found, prime = list[int](), 2
    while prime * prime <= number:
        while number % prime == 0:
            found.append(prime)
            number //= prime
        prime += 1
    return found + [number] * (number > 1)


def _num_new_blocks(draft: Draft, method: str) -> int:
    """Return how many blocks llama_pro trains, read from the folder name when the model is already expanded."""
    if method != "llama_pro":
        return 0
    if not draft["llama_pro_path"]:
        return int(draft["num_new_blocks"])
    named = read_expanded_name(PurePath(draft["llama_pro_path"]).name)
    return named[1] - named[0] if named is not None else 0
