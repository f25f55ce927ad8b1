"""Rebuild the byte-level BPE tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crosstune.core.errors import shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from crosstune.models.gguf_metadata import Metadata

PRE_TOKENIZERS = ("gpt-2", "smollm")
_CONTROL, _USER_DEFINED = 3, 4
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    tokenizer: Tokenizer
    special: dict[str, str | None]
    """The bos, eos, unk and pad tokens; None for one that the model does not have."""


def build_tokenizer(metadata: Metadata, *, num_rows: int) -> Vocabulary:
    """Make the tokenizer of a model whose embedding has `num_rows` rows."""
    from tokenizers import Tokenizer, decoders, models, processors

    kind, tokens = metadata.text("tokenizer.ggml.model"), metadata.texts("tokenizer.ggml.tokens")
    merges = metadata.texts("tokenizer.ggml.merges")
    if kind != "gpt2" or not tokens or not merges:
        raise metadata.unsupported(
            f"its tokenizer is of the kind {shown(kind)}; byte-level BPE ('gpt2') is supported"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens) or len(tokens) > num_rows:
        raise metadata.unsupported(
            f"its tokenizer has {len(tokens):,} tokens, {len(vocabulary):,} different ones, for {num_rows:,} embeddings"
        )
    pairs = [_split_merge(metadata, merge, vocabulary) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type")
    _add_marked_tokens(tokenizer, tokens, kinds if isinstance(kinds, list) else [])
    special = {role: _token(metadata, tokens, key) for role, key in ROLES.items()}
    if metadata.get("tokenizer.ggml.add_bos_token") and special["bos"] is not None:
        bos = special["bos"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
        )
    return Vocabulary(tokenizer=tokenizer, special=special)


def _pre_tokenizer(metadata: Metadata) -> PreTokenizer:
    from tokenizers import pre_tokenizers

    name = metadata.text("tokenizer.ggml.pre") or "gpt-2"
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    # With another pre-tokenizer the model would be trained on token sequences it has never seen.
    raise metadata.unsupported(f"it splits text as {shown(name)}; supported: {', '.join(PRE_TOKENIZERS)}")


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Add the control and user-defined tokens, so that text is split at them before BPE."""
    from tokenizers import AddedToken

    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _split_merge(metadata: Metadata, merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise metadata.unsupported(
            f"its tokenizer has the merge {shown(merge)}, which is not a pair of tokens"
        )
    return left, right


def _token(metadata: Metadata, tokens: list[str], key: str) -> str | None:
    number = metadata.token(key)
    if number is None:
        return None
    if number >= len(tokens):
        raise metadata.unsupported(f"its {key} token is number {number} of {len(tokens)}")
    return tokens[number]
