"""List the sizes of common models, so that planning needs no download."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from crosstune.estimate.fast_layers import why_no_fast_layers_of
from crosstune.estimate.model_shape import ModelShape
from crosstune.models.llama_layout import Llama

_ROWS = Path(__file__).with_suffix(".txt")
_VARIANT = re.compile(
    r"(?<=.)[-_](instruct|chat|hf|it|pt|base|beta|alpha|gguf|awq|gptq|mlx|bnb|nf4|unsloth|text|dpo|sft|rlhf|intermediate|step"
    r"|deduped|4k|8k|16k|32k|128k|bf16|fp16|fp8|int8|4bit|8bit|4-bit|8-bit|v\d[\w.]*|\d{4}|\d+k|reasoning|python|math"
    r"|coder|thinking|preview)(?=[-_]|$)"
)


def known_shape(name: str) -> ModelShape | None:
    """Return a model's shape by its hub id or folder name; variants share the sizes of their base."""
    rows = table()
    base = _base_name(name, rows)
    return _shape(rows[base]) if base in rows else None


def table() -> dict[str, list[str]]:
    """Map each base name to the fields of its row in known_models.txt."""
    rows = (line.split(":") for line in _ROWS.read_text(encoding="utf-8").splitlines()[1:])
    return {name: fields.split() for names, fields in rows for name in names.split()}


def _shape(fields: Sequence[str]) -> ModelShape:
    hidden, layers, intermediate, vocab, heads, kv_heads, head_dim = map(int, fields[:7])
    experts, per_token = map(int, [field for field in fields[10:] if field != "plain"] or (1, 2))
    matrix, family = layers * hidden * intermediate, fields[9]
    llama = Llama(
        vocab=vocab,
        hidden=hidden,
        intermediate=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        tied=fields[7] == "tied",
    ).shape()
    return replace(
        llama,
        # A plain MLP has two matrices; a gated one, and each expert, has three.
        num_parameters=llama.num_parameters + 3 * matrix * (experts - 1) - matrix * ("plain" in fields),
        source="table",
        max_context=None,
        num_experts=experts,
        expert_intermediate=intermediate if experts > 1 else 0,
        experts_per_token=per_token,
        family=family,
        why_general=why_no_fast_layers_of({"model_type": family}) or "",
    )


def _base_name(name: str, known: Collection[str]) -> str:
    """Return the part of a name that determines the sizes: `meta-llama/Llama-2-7b-chat-hf` -> `llama-2-7b`."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while last not in known and (shorter := _VARIANT.sub("", last)) != last:
        last = shorter
    return last
