"""List the sizes of common models, so that planning needs no download."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from crosstune.estimate.fast_layers import why_no_fast_layers_of
from crosstune.estimate.model_shape import ModelShape
from crosstune.models.llama_layout import Llama

# names: hidden layers intermediate vocabulary heads kv-heads head-width tied|own billions [experts per-token] [plain]
_TABLE = """
llama-7b llama-2-7b vicuna-7b: 4096 32 11008 32000 32 32 128 own 6.74
llama-13b llama-2-13b vicuna-13b: 5120 40 13824 32000 40 40 128 own 13.02
llama-30b: 6656 60 17920 32000 52 52 128 own 32.5
llama-65b: 8192 80 22016 32000 64 64 128 own 65.3
llama-2-70b: 8192 80 28672 32000 64 8 128 own 68.98
codellama-7b: 4096 32 11008 32016 32 32 128 own 6.74
codellama-13b: 5120 40 13824 32016 40 40 128 own 13.02
codellama-34b: 8192 48 22016 32000 64 8 128 own 33.74
llama-3-8b llama-3.1-8b deepseek-r1-distill-llama-8b: 4096 32 14336 128256 32 8 128 own 8.03
llama-3-70b llama-3.1-70b llama-3.3-70b deepseek-r1-distill-llama-70b: 8192 80 28672 128256 64 8 128 own 70.55
llama-3.1-405b: 16384 126 53248 128256 128 8 128 own 405.85
llama-3.2-1b: 2048 16 8192 128256 32 8 64 tied 1.236
llama-3.2-3b: 3072 28 8192 128256 24 8 128 tied 3.21
tinyllama-1.1b: 2048 22 5632 32000 32 4 64 own 1.1
mistral-7b: 4096 32 14336 32768 32 8 128 own 7.25
zephyr-7b: 4096 32 14336 32000 32 8 128 own 7.24
mistral-nemo: 5120 40 14336 131072 32 8 128 own 12.25
mistral-small-24b: 5120 40 32768 131072 32 8 128 own 23.57
ministral-8b: 4096 36 12288 131072 32 8 128 own 8.02
mistral-large: 12288 88 28672 32768 96 8 128 own 122.6
mixtral-8x7b: 4096 32 14336 32000 32 8 128 own 46.7 8 2
mixtral-8x22b: 6144 56 16384 32768 48 8 128 own 140.6 8 2
solar-10.7b: 4096 48 14336 32000 32 8 128 own 10.73
qwen1.5-0.5b: 1024 24 2816 151936 16 16 64 tied 0.464
qwen1.5-1.8b: 2048 24 5504 151936 16 16 128 own 1.84
qwen1.5-4b: 2560 40 6912 151936 20 20 128 own 3.95
qwen1.5-7b: 4096 32 11008 151936 32 32 128 own 7.72
qwen1.5-14b: 5120 40 13696 152064 40 40 128 own 14.17
qwen2-0.5b qwen2.5-0.5b: 896 24 4864 151936 14 2 64 tied 0.494
qwen2-1.5b qwen2.5-1.5b: 1536 28 8960 151936 12 2 128 tied 1.544
qwen2-7b qwen2.5-7b deepseek-r1-distill-qwen-7b: 3584 28 18944 152064 28 4 128 own 7.616
qwen2-72b qwen2.5-72b: 8192 80 29568 152064 64 8 128 own 72.7
qwen2.5-3b: 2048 36 11008 151936 16 2 128 tied 3.086
qwen2.5-14b deepseek-r1-distill-qwen-14b: 5120 48 13824 152064 40 8 128 own 14.77
qwen2.5-32b qwq-32b deepseek-r1-distill-qwen-32b: 5120 64 27648 152064 40 8 128 own 32.76
qwen3-0.6b: 1024 28 3072 151936 16 8 128 tied 0.596
qwen3-1.7b: 2048 28 6144 151936 16 8 128 tied 1.72
qwen3-4b: 2560 36 9728 151936 32 8 128 tied 4.02
qwen3-8b: 4096 36 12288 151936 32 8 128 own 8.19
qwen3-14b: 5120 40 17408 151936 40 8 128 own 14.77
qwen3-32b: 5120 64 25600 151936 64 8 128 own 32.76
qwen3-30b-a3b: 2048 48 768 151936 32 4 128 own 30.5 128 8
qwen3-235b-a22b: 4096 94 1536 151936 64 4 128 own 235.1 128 8
gemma-2b: 2048 18 16384 256000 8 1 256 tied 2.51
gemma-7b: 3072 28 24576 256000 16 16 256 tied 8.54
gemma-2-2b: 2304 26 9216 256000 8 4 256 tied 2.61
gemma-2-9b: 3584 42 14336 256000 16 8 256 tied 9.24
gemma-2-27b: 4608 46 36864 256000 32 16 128 tied 27.2
gemma-3-1b: 1152 26 6912 262144 4 1 256 tied 1.0
gemma-3-4b: 2560 34 10240 262208 8 4 256 tied 3.88
gemma-3-12b: 3840 48 15360 262208 16 8 256 tied 11.77
gemma-3-27b: 5376 62 21504 262208 32 16 128 tied 27.0
phi-2: 2560 32 10240 51200 32 32 80 own 2.78 plain
phi-3-mini phi-3.5-mini: 3072 32 8192 32064 32 32 96 own 3.82
phi-3-medium: 5120 40 17920 32064 40 10 128 own 13.96
phi-4: 5120 40 17920 100352 40 10 128 own 14.66
phi-4-mini: 3072 32 8192 200064 24 8 128 tied 3.84
smollm-135m smollm2-135m: 576 30 1536 49152 9 3 64 tied 0.1345
smollm-360m smollm2-360m: 960 32 2560 49152 15 5 64 tied 0.362
smollm-1.7b smollm2-1.7b: 2048 24 8192 49152 32 32 64 tied 1.711
smollm3-3b: 2048 36 11008 128256 16 4 128 tied 3.075
gpt2: 768 12 3072 50257 12 12 64 tied 0.124 plain
gpt2-medium: 1024 24 4096 50257 16 16 64 tied 0.355 plain
gpt2-large: 1280 36 5120 50257 20 20 64 tied 0.774 plain
gpt2-xl: 1600 48 6400 50257 25 25 64 tied 1.558 plain
opt-125m: 768 12 3072 50272 12 12 64 tied 0.125 plain
opt-1.3b: 2048 24 8192 50272 32 32 64 tied 1.316 plain
opt-6.7b: 4096 32 16384 50272 32 32 128 tied 6.66 plain
pythia-70m: 512 6 2048 50304 8 8 64 own 0.0704 plain
pythia-160m: 768 12 3072 50304 12 12 64 own 0.162 plain
pythia-410m: 1024 24 4096 50304 16 16 64 own 0.405 plain
pythia-1b: 2048 16 8192 50304 8 8 256 own 1.01 plain
pythia-1.4b: 2048 24 8192 50304 16 16 128 own 1.41 plain
pythia-2.8b: 2560 32 10240 50304 32 32 80 own 2.78 plain
pythia-6.9b: 4096 32 16384 50432 32 32 128 own 6.86 plain
pythia-12b: 5120 36 20480 50688 40 40 128 own 11.85 plain
yi-6b: 4096 32 11008 64000 32 4 128 own 6.06
yi-34b: 7168 60 20480 64000 56 8 128 own 34.39
yi-1.5-9b: 4096 48 11008 64000 32 4 128 own 8.83
deepseek-llm-7b: 4096 30 11008 102400 32 32 128 own 6.91
deepseek-coder-1.3b: 2048 24 5504 32256 16 16 128 own 1.346
deepseek-coder-6.7b: 4096 32 11008 32256 32 32 128 own 6.74
deepseek-coder-33b: 7168 62 19200 32256 56 8 128 own 33.34
deepseek-r1-distill-qwen-1.5b: 1536 28 8960 151936 12 2 128 own 1.777
olmo-2-0425-1b: 2048 16 8192 100352 16 16 128 own 1.485
olmo-2-1124-7b: 4096 32 11008 100352 32 32 128 own 7.3
olmo-2-1124-13b: 5120 40 13824 100352 40 40 128 own 13.72
stablelm-3b-4e1t: 2560 32 6912 50304 32 32 80 own 2.795
stablelm-2-1_6b: 2048 24 5632 100352 32 32 64 own 1.644
gpt-oss-20b: 2880 24 2880 201088 64 8 64 own 20.9 32 4
gpt-oss-120b: 2880 36 2880 201088 64 8 64 own 116.8 128 4
internlm2_5-7b: 4096 32 14336 92544 32 8 128 own 7.74
"""
# model_type: name prefixes in the table; the longest match counts
_FAMILIES = """
llama: llama codellama vicuna tinyllama solar smollm- smollm2 yi- deepseek-llm deepseek-coder deepseek-r1-distill-llama
mistral: mistral zephyr ministral
mixtral: mixtral
qwen2: qwen1.5 qwen2 qwq deepseek-r1-distill-qwen
qwen3: qwen3
qwen3_moe: qwen3-30b qwen3-235b
gemma: gemma
gemma2: gemma-2-
gemma3: gemma-3-
gemma3_text: gemma-3-1b
phi: phi-2
phi3: phi-3 phi-4
smollm3: smollm3
gpt2: gpt2
gpt_oss: gpt-oss
gpt_neox: pythia
opt: opt
olmo2: olmo-2
stablelm: stablelm
internlm2: internlm2
"""
_VARIANT = re.compile(
    r"(?<=.)[-_](instruct|chat|hf|it|pt|base|beta|alpha|gguf|awq|gptq|mlx|bnb|nf4|unsloth|text|dpo|sft|rlhf|intermediate|step"
    r"|deduped|4k|8k|16k|32k|128k|bf16|fp16|fp8|int8|4bit|8bit|4-bit|8-bit|v\d[\w.]*|\d{4}|\d+k|reasoning|python|math"
    r"|coder|thinking|preview)(?=[-_]|$)"
)


def known_shape(name: str) -> ModelShape | None:
    """Return a model's shape by its hub id or folder name; variants share the sizes of their base."""
    rows = table()
    base = _base_name(name, rows)
    return _shape(base, rows[base]) if base in rows else None


def table() -> dict[str, list[str]]:
    """Map each base name to the fields of its row."""
    rows = (line.split(":") for line in _TABLE.strip().splitlines())
    return {name: fields.split() for names, fields in rows for name in names.split()}


def _shape(name: str, fields: Sequence[str]) -> ModelShape:
    hidden, layers, intermediate, vocab, heads, kv_heads, head_dim = map(int, fields[:7])
    experts, per_token = map(int, [field for field in fields[9:] if field != "plain"] or (1, 2))
    matrix, family = layers * hidden * intermediate, _family(name)
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


def _family(name: str) -> str:
    """Return the `model_type` of a listed model."""
    rows = (line.split(":") for line in _FAMILIES.strip().splitlines())
    found = {start: family for family, starts in rows for start in starts.split() if name.startswith(start)}
    return found[max(found, key=len)]


def _base_name(name: str, known: Collection[str]) -> str:
    """Return the part of a name that determines the sizes: `meta-llama/Llama-2-7b-chat-hf` -> `llama-2-7b`."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    while last not in known and (shorter := _VARIANT.sub("", last)) != last:
        last = shorter
    return last
