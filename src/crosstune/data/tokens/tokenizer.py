"""Load the tokenizer of a model folder; convert text to token ids with offsets, and back."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.config.load import cache_base
from crosstune.core.errors import UserError, shown
from crosstune.estimate.vision import FAMILIES, Vision, read_vision
from crosstune.files.json_fields import (
    NOTHING,
    TEXT,
    check_fields,
    list_of,
    object_with,
    whole,
)
from crosstune.files.json_files import object_of, read_json
from crosstune.files.plain_files import MissingFile, UnreadableFile, read_plain, read_plain_text
from crosstune.process.limited_child import run_limited

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

GENERATION = "generation_config.json"
_TRIALS = "crosstune.data.tokens.trials"
_TRIALS_VERSION = 1
"""Increase when a trial changes, so that everything is tried again."""
TOKENIZER_LIMIT = 256 << 20
TEMPLATE_LIMIT = 4 << 20
_TOKEN = TEXT | NOTHING | object_with({"content": TEXT})
_TOKEN_ID = whole(-1, 2**31)
_FIELDS = {
    **{f"{role}_token": _TOKEN for role in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")},
    "chat_template": TEXT | NOTHING | list_of(object_with({"name": TEXT, "template": TEXT})),
}
_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_TRIMS, _KEEPS = (b'"trim_offsets":' + value for value in (b"true", b"false"))
_NAMES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """The tokenizer of a model: its chat template, its special tokens and the library's tokenizer."""

    rust: RustTokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_id: int
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    special: tuple[str, ...] = ()
    adds_bos: bool = False
    """True if the tokenizer prepends the BOS token to plain text."""
    other_named: tuple[tuple[str, str], ...] = ()
    """Further special tokens that chat templates refer to by name: (name, text)."""
    digest: str = ""
    """sha256 of tokenizer.json."""
    template_file: str = ""
    data_rules: int = 5
    """The version of the rules that tokenize training rows: the value of --data_rules."""
    vision: Vision | None = None
    """The settings for pictures; None if the model reads text only."""
    why_no_pictures: str = "this recipe reads text only"
    """Empty if pictures are read."""
    reads_parts: bool = False
    """True for a vision-language model, whose template reads contents as lists of parts."""
    num_rows: int | None = None
    """The model's number of embeddings, if its config.json is in the same folder."""

    @classmethod
    def from_folder(cls, folder: Path, *, model: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a folder; the stop tokens may come from the generation_config.json of `model`."""
        path = folder / "tokenizer.json"
        written = _read_tokenizer(folder)
        rust = _open(written, path)
        settings = _read_settings(folder / "tokenizer_config.json")
        tokens = _read_settings(folder / "special_tokens_map.json") | settings
        eos = _token_text(tokens.get("eos_token"))
        pad = _token_text(tokens.get("pad_token")) or eos
        bos = _token_text(tokens.get("bos_token"))
        template, template_file = _chat_template(folder, settings)
        if template is not None:
            try_template(template.encode(), path=template_file)
        with _readable_panics(str(path)):
            starts_with = rust.encode("a").ids[:1]
        return cls(
            rust=rust,
            chat_template=template,
            bos_token=bos,
            eos_token=eos,
            pad_id=(rust.token_to_id(pad) if pad else None) or 0,
            stop_ids=_stop_ids(
                folder if model is None or (folder / GENERATION).exists() else model, rust, eos
            ),
            special=tuple(t.content for t in rust.get_added_tokens_decoder().values() if t.special),
            adds_bos=bos is not None and starts_with == [rust.token_to_id(bos)],
            other_named=tuple((name, text) for name in _NAMES if (text := _token_text(tokens.get(name)))),
            digest=hashlib.sha256(written).hexdigest(),
            template_file=str(template_file),
            reads_parts=_is_vision(model or folder),
            num_rows=_num_rows(folder / "config.json"),
        )

    @cached_property
    def stripping(self) -> dict[int, str]:
        """The added tokens that strip adjacent white space: id -> text. Empty under older rules."""
        added = self.rust.get_added_tokens_decoder().items() if self.data_rules > 2 else ()
        return {number: token.content for number, token in added if token.lstrip or token.rstrip}

    @cached_property
    def _locating(self) -> RustTokenizer:
        """The tokenizer with offsets of whole tokens. With `trim_offsets`, offsets exclude the white space of a token, so
        that a token of white space belongs to no text; older rules keep this."""
        processor = self.rust.post_processor
        if self.data_rules < 4 or processor is None or _TRIMS not in processor.__getstate__():
            return self.rust
        from tokenizers import Tokenizer as RustTokenizer

        found = RustTokenizer.from_str(self.rust.to_str())
        processor = found.post_processor
        processor.__setstate__(processor.__getstate__().replace(_TRIMS, _KEEPS))
        found.post_processor = processor
        return found

    def with_vision(self, folder: Path, *, pixels: int | None) -> Tokenizer:
        """Return a tokenizer that knows the pictures of a model folder, each of at most this many pixels."""
        found = read_vision(folder)
        if isinstance(found, str):
            return replace(self, why_no_pictures=found)
        family = found.family
        missing = [
            text for text in (family.placeholder, family.soft_token) if self.rust.token_to_id(text) is None
        ]
        if missing or self.rust.token_to_id(family.soft_token) != found.soft_id:
            why = (
                f"its tokenizer lacks {missing[0]}"
                if missing
                else "its config names another token for pictures"
            )
            return replace(self, why_no_pictures=f"this model's files do not match: {why}")
        return replace(self, vision=found.limited(pixels), why_no_pictures="", reads_parts=True)

    def check_fits(self, vocab_size: int, *, source: str) -> None:
        """Raise a UserError when a token has no embedding in the model; `source` is the tokenizer's name."""
        highest = max(self.rust.get_vocab(with_added_tokens=True).values())
        if highest >= vocab_size:
            raise UserError(
                f"The tokenizer {source} does not match the model.",
                why=f"its highest token id is {highest}, and the model has embeddings for {vocab_size} tokens.",
                do="use a tokenizer without added tokens, or save the model with more embeddings (resize_token_embeddings)",
            )

    @property
    def leading_bos(self) -> str:
        """The BOS token that a template must write because the tokenizer adds one to plain text, or an empty string."""
        return self.bos_token if self.adds_bos and self.bos_token else ""

    @cached_property
    def stop_tokens(self) -> tuple[str, ...]:
        """The texts of the tokens at which the model stops, longest first."""
        stops = {self.decode([token], keep_special=True) for token in self.stop_ids} - {""}
        return tuple(sorted(stops, key=lambda text: (-len(text), text)))

    @property
    def picture(self) -> tuple[str, str]:
        """The template's text for a picture, and the text that the family writes in its place."""
        if self.vision is None or not self.vision.family.around:
            return "", ""
        text, around = self.vision.family.placeholder, self.vision.family.around
        return text, f"{around}{text}{around}"

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens under their names in chat templates. A token that is not set is undefined there."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token, **dict(self.other_named)}
        return {name: text for name, text in named.items() if text}

    def encode(self, text: str) -> Encoding:
        """Return token ids with their offsets. Adds no special tokens, since templates write their own."""
        with _readable_panics("The model's tokenizer"):
            found = self._locating.encode(text, add_special_tokens=False)
        self.check_largest(max(found.ids, default=0))
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode multiple strings on all cores. The caller checks the largest id."""
        with _readable_panics("The model's tokenizer"):
            return self._locating.encode_batch(list(texts), add_special_tokens=False)

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of plain-text documents, each with one BOS token if the tokenizer adds it, and one EOS token.
        The library adds the BOS token: in the text, it would replace the first word, which some tokenizers mark."""
        bos, eos = (
            self.rust.token_to_id(text) if text else None for text in (self.bos_token, self.eos_token)
        )
        with _readable_panics("The model's tokenizer"):
            encodings = self.rust.encode_batch_fast(list(texts), add_special_tokens=True)
        found = []
        for encoding in encodings:
            ids = list(encoding.ids)
            # The text may contain them already.
            if ids[:2] == [bos, bos]:
                del ids[0]
            if ids[-2:] == [eos, eos]:
                del ids[-1]
            elif eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
            found.append(ids)
        return found

    def check_largest(self, largest: int) -> None:
        """Raise a UserError when the model has no embedding for the largest id in a text."""
        if self.num_rows is not None and largest >= self.num_rows:
            raise UserError(
                f"The tokenizer and the model do not match: token {largest} is {shown(self.rust.id_to_token(largest))}.",
                why=f"vocab_size in config.json is {self.num_rows}, so the model has no embedding for it.",
                do="use the tokenizer of this model, or resize the model's embeddings",
            )

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        with _readable_panics("The model's tokenizer"):
            return str(self.rust.decode(list(ids), skip_special_tokens=not keep_special))


def _read_tokenizer(folder: Path) -> bytes:
    path = folder / "tokenizer.json"
    try:
        return read_plain(path, limit=TOKENIZER_LIMIT)
    except MissingFile as error:
        raise UserError(
            f"{folder} does not contain tokenizer.json.",
            why="crosstune reads fast tokenizers only.",
            do="create it with: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
        ) from error


def try_tokenizer(raw: bytes, *, path: Path) -> None:
    """Raise a UserError unless the tokenizer loads and encodes a few long strings in time."""
    _try("tokenizers", raw, path=path, cpu_seconds=10, memory_bytes=4 << 30)


def try_template(raw: bytes, *, path: Path) -> None:
    """Raise a UserError when a chat template renders ordinary conversations beyond the limits."""
    _try("templates", raw, path=path, cpu_seconds=5, memory_bytes=1 << 30)


def _try(kind: str, raw: bytes, *, path: Path, cpu_seconds: int, memory_bytes: int) -> None:
    """Run a trial. A pass is recorded by the file's hash in crosstune's cache folder."""
    passed = _verdict(kind, hashlib.sha256(raw).hexdigest())
    if passed is not None and passed.is_file():
        return
    run_limited(
        _TRIALS,
        f"{kind}\n".encode() + raw,
        what=f"{path} cannot be used.",
        do=f"download or copy the file again, or use different {kind}",
        cpu_seconds=cpu_seconds,
        memory_bytes=memory_bytes,
    )
    if passed is not None:
        with contextlib.suppress(OSError):  # without a cache, it is tried again next time
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()


def _verdict(kind: str, digest: str) -> Path | None:
    try:
        return cache_base() / kind / f"{digest}-{_TRIALS_VERSION}"
    except UserError:  # no home folder
        return None


def _may_be_slow(value: Any) -> bool:
    """Return True if a stage has a regex, a table or a replacement that lengthens text."""
    if isinstance(value, list):
        return any(map(_may_be_slow, value))
    if not isinstance(value, dict):
        return False
    pattern, content = value.get("pattern"), value.get("content")
    fixed = pattern.get("String") if isinstance(pattern, dict) else None
    grows = isinstance(content, str) and isinstance(fixed, str) and len(content) > len(fixed)
    has_regex = isinstance(pattern, dict) and "Regex" in pattern
    return grows or has_regex or "precompiled_charsmap" in value or any(map(_may_be_slow, value.values()))


@lru_cache(maxsize=1)
def _open(raw: bytes, path: Path) -> RustTokenizer:
    """Parse tokenizer.json, after a trial if it may be slow; the library checks its structure.

    The last result is kept, because a command checks its request and then opens its data; change only a copy of it.
    """
    from tokenizers import Tokenizer as RustTokenizer

    tokenizer = object_of(raw, path, foreign=True)
    if any(_may_be_slow(tokenizer.get(stage)) for stage in _STAGES):
        try_tokenizer(raw, path=path)
    with _readable_panics(str(path)):
        try:
            rust = RustTokenizer.from_buffer(raw)
        except ValueError as error:
            raise UnreadableFile(path, str(error)[:300]) from error
    # Truncation and padding are done elsewhere.
    rust.no_truncation()
    rust.no_padding()
    return rust


@contextlib.contextmanager
def _readable_panics(what: str) -> Iterator[None]:
    """Turn a panic of the tokenizers library into a UserError. Its class is not an `Exception` and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise UserError(
            f"{what} cannot be used.",
            why=f"the tokenizers library fails: {shown(str(error))}.",
            do="download or copy tokenizer.json again, or use a different tokenizer",
        ) from error


def _read_settings(path: Path) -> dict[str, Any]:
    settings = read_json(path, foreign=True)
    check_fields(settings, _FIELDS, source=path)
    return settings


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _chat_template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, Path]:
    """Return the chat template and its file."""
    file = folder / "chat_template.jinja"
    try:
        return read_plain_text(file, limit=TEMPLATE_LIMIT), file
    except MissingFile:
        beside = folder / "chat_template.json"  # of older vision-language models
        template = read_json(beside, foreign=True).get("chat_template")
        if isinstance(template, str):
            return template, beside
        template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template, folder / "tokenizer_config.json"


def _is_vision(folder: Path) -> bool:
    config = read_json(folder / "config.json", foreign=True)
    return isinstance(config, dict) and config.get("model_type") in FAMILIES


def _num_rows(path: Path) -> int | None:
    config = read_json(path, foreign=True)
    inner = config.get("text_config")
    found = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return found if whole(1).fits(found) else None


def _stop_ids(folder: Path, rust: RustTokenizer, eos: str | None) -> frozenset[int]:
    path = folder / GENERATION
    settings = read_json(path, foreign=True)
    check_fields(settings, {"eos_token_id": _TOKEN_ID | NOTHING | list_of(_TOKEN_ID)}, source=path)
    declared = settings.get("eos_token_id")
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(rust.token_to_id(eos) if eos else None)
    return frozenset(token for token in ids if token is not None and token >= 0)  # some models write -1
