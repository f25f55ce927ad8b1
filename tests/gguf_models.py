"""Tiny random models of the families that GGUF files are written for, each with a tokenizer of its kind; and texts."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM

from crosstune.models.tiny import _TEXT as ENGLISH
from crosstune.models.tiny import CHATML

CORPUS = [
    ENGLISH,
    "Der schnelle braune Fuchs springt über den faulen Hund. Größe, Maß, Übung. Ça va très bien, merci à tous! ¿Qué tal?",
    "Привет, мир! Съешь же ещё этих мягких французских булок. Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "你好，世界。我们今天去北京。こんにちは、世界。カタカナとひらがな。안녕하세요 세계 नमस्ते दुनिया สวัสดี",
    "def f(x):\n    if x > 10:\n\t\treturn x ** 2  # 1234567890\n\n\n    return {'a': [1, 2.5e-3]}\r\n" * 3,
    "I'm sure we'll say THEY'RE here; it's DON'T or won't. 3.14159 and 1,000,000 or 2024-11-18. 🙂🚢 café ½ ²",
]
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL: dict[str, tuple[str | None, bool]] = {
    "gpt-2": (None, False),
    "smollm": ("digits", False),
    "llama-bpe": (_WORDS % r"\p{N}{1,3}", True),
    "dbrx": (_CL100K, False),
    "qwen2": (_WORDS % r"\p{N}", False),
    "tekken": (_TEKKEN, True),
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool>", "<|custom|>"]


def _byte_level(kind: str, vocab: int) -> tokenizers.Tokenizer:
    pattern, ignore_merges = BYTE_LEVEL[kind]
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))
    if pattern is None:
        made.pre_tokenizer = byte_level
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = digits if pattern == "digits" else pre_tokenizers.Split(Regex(pattern), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(each, special=True, normalized=False) for each in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer=trainer)
    return made


def _sentencepiece(kind: str, vocab: int) -> tokenizers.Tokenizer:
    """BPE as SentencePiece has it: any two pieces whose text is a piece merge, in the order of that piece."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+|▁+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=vocab - 300, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer=trainer)
    pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁" * count for count in range(2, 9)]
    names += [piece for piece in pieces if piece not in names]
    ids = {name: number for number, name in enumerate(names)}
    merges = [
        (name[:cut], name[cut:])
        for name in names[len(SPECIAL) + 256 :]
        for cut in range(1, len(name))
        if name[:cut] in ids and name[cut:] in ids
    ]
    made = tokenizers.Tokenizer(
        models.BPE(vocab=ids, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    )
    replace = normalizers.Replace(" ", "▁")
    if kind == "first":
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    elif kind == "never":
        made.normalizer = replace
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    plain = ("<unk>", "<s>", "<|endoftext|>")
    strips = kind == "phi3"
    made.add_special_tokens(
        [AddedToken(e, special=True, normalized=False, rstrip=strips and e not in plain) for e in SPECIAL]
    )
    return made


def write_tokenizer(folder: Path, kind: str, vocab: int = 1000) -> int:
    """Write a tokenizer with two further tokens and a chat template; return the number of tokens."""
    made = _byte_level(kind, vocab) if kind in BYTE_LEVEL else _sentencepiece(kind, vocab)
    strips = kind == "phi3"
    made.add_special_tokens([AddedToken(ADDED[1], special=True, normalized=False, rstrip=strips)])
    if not strips:
        made.add_tokens([AddedToken(ADDED[0], special=False, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "unk_token": "<unk>",
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    bos = "" if kind in BYTE_LEVEL else "{{ bos_token }}"
    (folder / "chat_template.jinja").write_text(bos + CHATML)
    return made.get_vocab_size(with_added_tokens=True)


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 512,
    "long_factor": [1.0 + 0.25 * n for n in range(32)],
    "short_factor": [1.0 + 0.03 * n for n in range(32)],
}
_GEMMA = {"query_pre_attn_scalar": 64, "sliding_window": 16, "tie_word_embeddings": True}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-2": ("llama", "always", {}),
    "llama-3": ("llama", "llama-bpe", {"rope_parameters": _LLAMA3}),
    "smollm2": ("llama", "smollm", {"tie_word_embeddings": True}),
    "mistral": ("mistral", "first", {"sliding_window": None}),
    "mistral-nemo": ("mistral", "tekken", {"sliding_window": None, "head_dim": 32}),
    "mixtral": ("mixtral", "always", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen2", {"head_dim": 32}),
    "qwen3-moe": ("qwen3_moe", "qwen2", {**_MOE, "head_dim": 64}),
    "gemma-2": ("gemma2", "never", {**_GEMMA, "head_dim": 64}),
    "gemma-3": ("gemma3_text", "never", {**_GEMMA, "head_dim": 64, "num_hidden_layers": 7}),
    "phi-3": ("phi3", "phi3", {"rope_parameters": _LONG, "max_position_embeddings": 2048}),
    "phi-4": ("phi3", "dbrx", {"original_max_position_embeddings": 512}),
    "smollm3": ("smollm3", "llama-bpe", {"num_hidden_layers": 5}),
    "starcoder2": ("starcoder2", "smollm", {"sliding_window": None}),
    "granite": (
        "granite",
        "smollm",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
}
"""Name -> (model_type, tokenizer, options)."""


def write_family(name: str, folder: Path, *, hidden: int = 256, dtype: Any = torch.float32) -> Path:
    """Write a random model of a family. Norms and biases are random too, so that a missing one is noticed."""
    kind, tokenizer, options = FAMILIES[name]
    vocab = write_tokenizer(folder, tokenizer)
    sizes = {
        "vocab_size": vocab + 7,  # rows without a token
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 7,
        "pad_token_id": 3,
        "rope_theta": 500.0,
    }
    config = AutoConfig.for_model(kind, **{**sizes, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn_like(weight)
            weight.copy_(weight + 0.1 * noise if weight.ndim == 1 else 0.06 * noise)
    model.to(dtype).save_pretrained(folder)
    return folder


def make_texts(count: int, *, special: list[str], seed: int = 0) -> list[str]:
    """Random texts of words, digits, spaces, characters of many scripts, and special tokens; all in NFC."""
    draw = random.Random(seed)
    words = [word for text in CORPUS for word in text.split()]
    spaces = [" ", " ", " ", "  ", "    ", "\n", "\n\n", "\t", "\r\n", " \n ", "\u00a0", "\u3000"]
    ranges = [(0x21, 0x7E), (0xA1, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x621, 0x64A)]
    ranges += [
        (0x904, 0x939),
        (0x4E00, 0x9FA5),
        (0x3041, 0x30FF),
        (0xAC00, 0xD7A3),
        (0x1F300, 0x1F6FF),
        (0x2190, 0x22FF),
    ]

    def piece() -> str:
        choice = draw.random()
        if choice < 0.45:
            return draw.choice(words)
        if choice < 0.6:
            return str(draw.randrange(10 ** draw.randint(1, 12)))
        if choice < 0.7:
            return draw.choice(special)
        if choice < 0.75:
            return draw.choice(words).upper() + draw.choice(["'s", "'LL", "'re", "’s", "'"])
        start, end = draw.choice(ranges)
        return "".join(chr(draw.randint(start, end)) for _ in range(draw.randint(1, 6)))

    texts = []
    for _ in range(count):
        parts = [piece() + draw.choice([*spaces, "", "", ""]) for _ in range(draw.randint(1, 12))]
        text = draw.choice(["", "", " "]) + "".join(parts)
        texts.append(unicodedata.normalize("NFC", text))
    return texts
