"""Check the header of a GGUF file, read its metadata, and rebuild its byte-level BPE tokenizer."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from crosstune.core.errors import UserError, shown
from crosstune.files.json_fields import ANYTHING, NOTHING, TEXT, Rule, list_of, whole
from crosstune.files.plain_files import UnreadableFile, open_plain

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

PRE_TOKENIZERS = ("gpt-2", "smollm")
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Token types."""
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_ITEMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type of a number -> its letter in `struct`."""
_TENSORS = {
    0: (1, 4), 1: (1, 2), 30: (1, 2),
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210),
    20: (32, 18), 23: (256, 136),
}  # fmt: skip
"""Type of a tensor -> the weights and bytes of a block: F32, F16 and BF16; Q4_0 to Q8_0; Q2_K to Q6_K; IQ4_NL and IQ4_XS."""
_COUNT_LIMIT = 65_536
_ENTRIES_LIMIT = 4_000_000
"""Limit for all arrays together; the gguf package makes an object for each entry."""
_STRING_LIMIT = 16 << 20
_MOST_DIMS, _ALIGNMENT = 8, 32


class BadGguf(UnreadableFile):
    """The file is not a complete GGUF file, or exceeds a limit."""

    problem = "is not a complete GGUF file"


def check_header(path: Path) -> dict[str, Any]:
    """Return the numbers and texts of a header. Raise BadGguf if it is invalid, or declares a string, an array or a tensor
    that does not fit in the file."""
    with open_plain(path) as file:
        try:
            return _read_header(file, path)
        except struct.error as error:
            raise BadGguf(path, "it ends within its header") from error


def _read_header(file: BinaryIO, path: Path) -> dict[str, Any]:
    size, num_entries, found = os.fstat(file.fileno()).st_size, 0, dict[str, Any]()

    def read(form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))

    def text(what: str) -> str:
        (length,) = read("Q")
        if length > min(_STRING_LIMIT, size - file.tell()):
            raise BadGguf(
                path, f"{what} is declared with {length:,} bytes, and {size - file.tell():,} follow"
            )
        return file.read(length).decode("utf-8", errors="replace")

    if file.read(4) != _MAGIC:
        raise BadGguf(path, "it does not begin with GGUF" if size else "it is empty")
    version, num_tensors, num_keys = read("IQQ")
    if version not in _VERSIONS:
        raise BadGguf(path, f"it has version {version}; versions 2 and 3 are supported")
    if max(num_tensors, num_keys) > _COUNT_LIMIT:
        raise BadGguf(path, f"it declares {num_tensors:,} tensors and {num_keys:,} keys")
    for _ in range(num_keys):
        name, (kind,), count = text("a key"), read("I"), None
        if kind == _ARRAY:
            kind, count = read("IQ")
            num_entries += count
        if kind != _STRING and kind not in _ITEMS:
            raise BadGguf(path, f"{shown(name)} has the unknown type {kind}")
        item_bytes = struct.calcsize(_ITEMS.get(kind, "Q"))  # a string has at least its length
        if (count or 1) * item_bytes > size - file.tell():
            of = f", declared with {count:,} entries" if count is not None else ""
            raise BadGguf(path, f"the file ends within {shown(name)}{of}")
        if num_entries > _ENTRIES_LIMIT:
            raise BadGguf(path, f"its arrays have more than {_ENTRIES_LIMIT:,} entries")
        if kind == _STRING:
            texts = [text(f"an entry of {shown(name)}") for _ in range(1 if count is None else count)]
            found |= {name: texts[0]} if count is None else {}
        elif count is None:
            (found[name],) = read(_ITEMS[kind])
        else:
            file.seek(count * item_bytes, os.SEEK_CUR)
    ends = [0]
    for _ in range(num_tensors):
        text("the name of a tensor")
        (num_dims,) = read("I")
        if num_dims > _MOST_DIMS:
            raise BadGguf(path, f"a tensor has {num_dims:,} dimensions")
        *shape, kind, offset = read(f"{num_dims}QIQ")
        weights, num_bytes = _TENSORS.get(kind, (1, 0))
        ends.append(offset + math.prod(shape) // weights * num_bytes)
    alignment = found.get("general.alignment")
    unit = alignment if isinstance(alignment, int) and alignment > 0 else _ALIGNMENT
    end = -(-file.tell() // unit) * unit + max(ends)
    if num_tensors and end > size:
        raise BadGguf(path, f"it has {size:,} bytes of {end:,}")
    return found


class Metadata:
    """The key-value metadata of a GGUF file."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self._path, self._fields, self.tensors = path, reader.fields, reader.tensors

    def get(self, key: str, rule: Rule = ANYTHING, default: Any = None) -> Any:
        """Return a value, or `default` if the key is missing; raise a UserError if the value breaks the rule."""
        value = self._fields[key].contents() if key in self._fields else default
        if not rule.fits(value):
            raise self.unsupported(f"its metadata has {shown(value)} for {key}, which needs {rule.needs}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of 1 or more."""
        return int(self.get(key, whole(1, 2**31), default))

    def token(self, role: str) -> int | None:
        """Return the id of the bos, eos, padding or unknown token."""
        return self.get(f"tokenizer.ggml.{role}_token_id", whole(0, 2**31) | NOTHING)

    def unsupported(
        self, why: str, *, do: str = "use a different file, or the model's Hugging Face folder"
    ) -> UserError:
        return UserError(f"The GGUF file {self._path} cannot be used.", why=f"{why}.", do=do)


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
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == USER_DEFINED:
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
