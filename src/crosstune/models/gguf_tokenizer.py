"""Rebuild the byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crosstune.core.errors import shown
from crosstune.files.json_fields import TEXT, list_of, whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from crosstune.models.gguf_metadata import Metadata

PRE_TOKENIZERS = ("gpt-2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def build_tokenizer(metadata: Metadata, *, num_rows: int) -> tuple[Tokenizer, dict[str, str | None]]:
    """Return the tokenizer of a model with `num_rows` embeddings, and its bos, eos, unk and pad tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors

    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", list_of(TEXT), [])
    merges: list[str] = metadata.get("tokenizer.ggml.merges", list_of(TEXT), [])
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", list_of(whole(0)), [])
    if kind != "gpt2" or not tokens or not merges:
        raise metadata.unsupported(f"its tokenizer is {shown(kind)}; only byte-level BPE (gpt2) is supported")
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) < len(tokens) or len(tokens) > num_rows:
        raise metadata.unsupported(f"its {len(tokens):,} tokens repeat or exceed its {num_rows:,} embeddings")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    for left, right in pairs:
        if not {left, right, left + right} <= ids.keys():
            raise metadata.unsupported(
                f"it has the merge {shown((left, right))}, which is not a pair of tokens"
            )
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    # Text is split at control and user-defined tokens before BPE.
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    numbers = {role: metadata.token(key) for role, key in ROLES.items()}
    if max(number or 0 for number in numbers.values()) >= len(tokens):
        raise metadata.unsupported(f"its special tokens {numbers} exceed its {len(tokens)} tokens")
    special = {role: None if number is None else tokens[number] for role, number in numbers.items()}
    bos = special["bos"]
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids[bos])]
        )
    return tokenizer, special


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    from tokenizers import pre_tokenizers

    name = metadata.get("tokenizer.ggml.pre") or "gpt-2"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    # With a different pre-tokenizer, the model would be trained on token sequences it has never seen.
    raise metadata.unsupported(f"it splits text as {shown(name)}; supported: {', '.join(PRE_TOKENIZERS)}")
