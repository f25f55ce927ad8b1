"""Fit a training step into memory by changes that keep the result the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from crosstune.config.conditions import work_of_rows
from crosstune.config.options.training import AUTO
from crosstune.config.resolve.memory_advice import advise
from crosstune.config.resolve.plan import Draft
from crosstune.config.schema import options_by_name
from crosstune.core.names import read_expanded_name
from crosstune.estimate.machine import held_score_bits
from crosstune.estimate.memory import (
    GIB,
    Fitted,
    largest_batch,
    step_parts,
    surely_too_large,
    teacher_bytes,
)
from crosstune.estimate.model_shape import Step, expand_shape
from crosstune.estimate.step_time import forward_flops

MAX_ESTIMATED = 64
"""Maximum estimated batch for `--batch_size auto`."""
_BITS = {"8bit": 8, "4bit": 4}
"""Values of --teacher_quantization."""
RECOMPUTES_BY_MEMORY = "cuda"
"""The torch device (including ROCm) on which the fast layers recompute by free memory."""


def fit_memory(draft: Draft, *, limit: int) -> Fitted | None:
    """Turn on activation checkpointing, then reduce the micro-batch, until a step fits into `limit` bytes per process.

    Return the fitted step; None if the shape of the model is unknown.
    """
    facts, report = draft.facts, draft.report
    fitted = _Fitting(draft=draft, limit=limit)
    if draft["batch_size"] == AUTO:
        _choose_batch(draft, fitted, limit=limit)
    if fitted.shape is None:
        return None
    need = fitted.estimate()
    if not limit:
        return fitted.result()
    why = f"the step is estimated at {need / GIB:.1f} GiB and {report.name} has {limit / GIB:.1f} GiB to use"
    # The fast layers recompute as many layers as needed.
    recomputes = draft["kernels"] == "fast" and report.device == RECOMPUTES_BY_MEMORY
    if need > limit and not recomputes and not draft.is_asked("use_gradient_checkpointing"):
        draft.set("use_gradient_checkpointing", True, why)
        need = fitted.estimate()
    batch, rows = draft["batch_size"], draft["batch_size"] * draft["gradient_accumulation_steps"]
    for smaller in (size for size in range(batch - 1, 0, -1) if rows % size == 0):
        if need <= limit:
            break
        draft.set("batch_size", smaller, why)
        draft.set("gradient_accumulation_steps", rows // smaller, "keeps the number of rows per step")
        need = fitted.estimate()
    if need > limit and (teacher := fitted.step().teacher_bytes) and draft["teacher_quantization"] == "none":
        smaller_teacher = fitted.teacher_bytes("4bit")
        draft.warn(
            "teacher",
            f"it takes {teacher / GIB:.1f} GiB of that; --teacher_quantization 4bit makes it {smaller_teacher / GIB:.1f} GiB",
        )
    if need > limit:
        advice = advise(
            {name: draft[name] for name in draft.request.options()}
            | ({"use_gradient_checkpointing": True} if recomputes else {}),
            report=report,
            spec=facts.backends[report.name],
            method=draft.method,
            quantizer=draft.quantizer,
            environment=facts.environment,
            longest_row=facts.longest_row,
            fits=fitted.fits,
        )
        alone = len(advice.resumable) + len(advice.new_run) > 1
        sure = (
            "it does not fit into memory" if surely_too_large(need, limit) else "it may not fit into memory"
        )
        rows = "one row is" if draft["batch_size"] == 1 else f"the step of {draft['batch_size']} rows is"
        draft.warn(
            "batch_size",
            f"{rows} still estimated at {need / GIB:.1f} GiB of {limit / GIB:.1f} GiB; {sure}: {advice.sentence()}"
            + "; no other single option is enough, `crosstune plan` searches for several" * (not alone),
        )
    return fitted.result()


@dataclass(kw_only=True)
class _Fitting:
    """Estimate the step of a draft while its options change."""

    draft: Draft
    limit: int

    def __post_init__(self) -> None:
        shape = self.draft.facts.shape
        self.num_new = _num_new_blocks(self.draft)
        if shape is not None and self.num_new and not self.draft["llama_pro_path"]:
            shape = expand_shape(shape, self.num_new)
        self.shape = shape

    def step(self) -> Step:
        draft, report = self.draft, self.draft.report
        precision, longest = draft["precision"], draft.facts.longest_row
        compute_bits = 32 if precision == "fp32" else 16
        work = work_of_rows({name: draft[name] for name in draft.request.options()})
        most = work.num_answers * draft["context_length"]
        context = min(most, longest or most)
        parts = min(draft["context_parallel"], draft.world_size)
        target = draft.facts.longest_target
        fast = draft["kernels"] == "fast" and report.engine == "torch"
        shape = self.shape
        step = Step(
            method=draft.method,
            rank=draft["lora_rank"],
            targets=draft["lora_target_modules"],
            saved=f"{draft['modules_to_save'] or ''},{'embed_tokens,lm_head' if draft['add_tokens'] else ''}",
            quantizer=draft.quantizer,
            # The fast layers store fp8 weights in two layouts.
            n_bits=16 if fast and draft.quantizer == "fp8" else draft.n_bits,
            group_size=draft["group_size"],
            double_quant=draft["double_quant"],
            batch=draft["batch_size"],
            context=-(-context // parts),
            row_parts=parts,
            answers=work.num_answers,
            extra_passes=work.num_passes,
            first_passes=work.num_first_passes,
            compares_logits=draft["recipe"] == "distill",
            copies_trained=work.copies_weights,
            patches=draft.facts.patches,
            trains_tower=draft["train_vision_tower"],
            trains_projector=draft["train_projector"],
            supervised=target if target is None or parts == 1 else min(target, -(-context // parts)),
            checkpointing=draft["use_gradient_checkpointing"],
            compute_bits=compute_bits,
            weight_bits=32 if precision.endswith("_autocast") else compute_bits,
            score_bits=held_score_bits(
                report,
                flash=draft["use_flash_attention"],
                compute_bits=compute_bits,
                shares_keys=shape is not None and shape.keys < shape.queries and not draft["packing"],
                has_sinks=shape is not None and shape.has_sinks,
            ),
            dropout=draft["lora_dropout"] > 0,
            optimizer=draft["optimizer"],
            averages=draft["ema_decay"] > 0,
            num_micro_batches=draft["gradient_accumulation_steps"],
            num_new_blocks=self.num_new,
            num_shards=draft.num_shards,
            on_gpu=not report.is_torch_cpu,
            offloads_activations=draft["use_activation_cpu_offload"],
            fast=fast,
            fp8_products=fast and (draft["base_precision"] == "fp8" or draft.quantizer == "fp8"),
            limit_bytes=int(self.limit / max(1.0, self._factor())),
            recomputes_by_memory=report.device == RECOMPUTES_BY_MEMORY,
            overhead_bytes=draft.facts.backends[report.name].overhead_bytes,
        )
        return self._with_teacher(step)

    def _with_teacher(self, step: Step) -> Step:
        """Add the memory and the passes of a teacher that is a second model."""
        draft, teacher, shape = self.draft, self.draft.facts.teacher, self.shape
        if teacher is None or shape is None:
            return step
        stays = not draft["teacher_top_k"]
        passes = forward_flops(teacher, step.context) / forward_flops(shape, step.context)
        return replace(
            step,
            teacher_bytes=teacher_bytes(teacher, step, bits=_BITS.get(draft["teacher_quantization"])),
            teacher_stays=stays,
            extra_passes=passes if stays else 0,
            first_passes=0 if stays else passes,
        )

    def teacher_bytes(self, quantization: str) -> int:
        """Return the memory of the teacher with another quantization."""
        assert self.draft.facts.teacher is not None
        return teacher_bytes(self.draft.facts.teacher, self.step(), bits=_BITS[quantization])

    def result(self, **changed: Any) -> Fitted:
        assert self.shape is not None
        step = replace(self.step(), **changed)
        parts = step_parts(self.shape, step)
        # Measurements of earlier runs exclude the memory of the GPU context.
        apart = 0 if self.draft.report.is_torch_cpu else parts.overhead
        estimated = int((parts.total - apart) * self._factor()) + apart
        return Fitted(shape=self.shape, step=step, parts=parts, estimated_bytes=estimated)

    def estimate(self) -> int:
        return self.result().estimated_bytes

    def fits(self, fields: Mapping[str, Any], *, more_memory: float = 1.0) -> bool:
        """Return whether the step fits with some of its fields changed, or with this many times the memory."""
        return self.result(**fields).estimated_bytes <= self.limit * more_memory

    def _factor(self) -> float:
        """Return measured divided by predicted memory of earlier runs."""
        correction = self.draft.facts.corrections.get(self.draft.report.name)
        return correction.factor if correction is not None else 1.0


def _choose_batch(draft: Draft, fitting: _Fitting, *, limit: int) -> None:
    """Set an estimate for `--batch_size auto`; `train` replaces it with a measured value."""
    chosen = options_by_name()["batch_size"].default
    if fitting.shape is not None and limit:
        draft.values["batch_size"] = 1
        step = replace(fitting.step(), limit_bytes=0)  # a larger batch does not make up for recomputed layers
        chosen = largest_batch(fitting.shape, step, limit_bytes=limit, at_most=MAX_ESTIMATED)
        if not chosen and not draft.is_asked("use_gradient_checkpointing"):  # `fit_memory` turns it on
            step = replace(step, checkpointing=True)
            chosen = largest_batch(fitting.shape, step, limit_bytes=limit, at_most=MAX_ESTIMATED)
        chosen = max(1, chosen)
    how = "estimated" if fitting.shape is not None else "a first guess: the model's sizes are unknown"
    draft.set("batch_size", chosen, f"{how}; train measures it", kind="choice")


def _num_new_blocks(draft: Draft) -> int:
    """Return the number of blocks that llama_pro trains; read it from the folder name of an expanded model."""
    if draft.method != "llama_pro":
        return 0
    if not draft["llama_pro_path"]:
        return int(draft["num_new_blocks"])
    named = read_expanded_name(PurePath(draft["llama_pro_path"]).name)
    return named[1] - named[0] if named is not None else 0
