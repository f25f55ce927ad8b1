"""Fit a training step into memory by changes that do not change the result."""

from __future__ import annotations

from pathlib import PurePath

from crosstune.config.draft import Draft
from crosstune.config.memory_advice import advise
from crosstune.core.attention import held_score_bits
from crosstune.core.expanded_name import read_expanded_name
from crosstune.core.memory import GIB, expand_shape, step_bytes


def fit_memory(
    draft: Draft,
    *,
    method: str,
    quantizer: str,
    n_bits: int,
    limit: int,
    num_shards: int = 1,
) -> int | None:
    """Turn on activation checkpointing, then reduce the micro-batch, until the step fits into `limit` bytes of each
    process; return its estimated bytes. The weights are divided over `num_shards` processes."""
    facts, report = draft.facts, draft.report
    shape = facts.shape
    if shape is None:
        return None
    num_new = _num_new_blocks(draft, method)
    if num_new and not draft["llama_pro_path"]:
        shape = expand_shape(shape, num_new)

    def estimate() -> int:
        precision = draft["precision"]
        full_width = precision == "fp32" or precision.endswith("_autocast")
        compute_bits = 32 if precision == "fp32" else 16
        stored = 16 if quantizer == "fp8" else n_bits  # fp8 is held in two layouts
        return step_bytes(
            shape,
            method=method,
            bits=stored if quantizer != "none" else 32 if full_width else 16,
            rank=draft["lora_rank"],
            batch=draft["batch_size"],
            context=min(draft["context_length"], facts.longest_row or draft["context_length"]),
            checkpointing=draft["use_gradient_checkpointing"],
            compute_bits=compute_bits,
            score_bits=held_score_bits(report, flash=draft["use_flash_attention"], compute_bits=compute_bits),
            num_new_blocks=num_new,
            num_shards=num_shards,
        )

    need = estimate()
    if not limit:
        return need
    why = f"the step is estimated at {need / GIB:.1f} GiB and {report.name} has {limit / GIB:.1f} GiB to use"
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
        advice = advise(
            {name: draft[name] for name in draft.asked.options()},
            report=report,
            spec=facts.backends[report.name],
            method=method,
            quantizer=quantizer,
            environment=facts.environment,
            longest_row=facts.longest_row,
        )
        rows = "one row is" if draft["batch_size"] == 1 else f"the step of {draft['batch_size']} rows is"
        draft.warn(
            "batch_size",
            f"{rows} still estimated at {need / GIB:.1f} GiB of {limit / GIB:.1f} GiB; it may not fit into memory: "
            f"{advice.sentence()}",
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
