"""Load the tokenizer of a model folder; convert text to token ids with offsets, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer

GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    rust: RustTokenizer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_id: int
    stop_ids: frozenset[int]
    """Tokens that end an answer."""
    special: tuple[str, ...] = ()
    """The texts of the special tokens."""
    adds_bos: bool = False
    """Whether the tokenizer prepends the BOS token to plain text."""
    digest: str = ""
    """sha256 of tokenizer.json."""

    @classmethod
    def from_folder(cls, folder: Path, *, model: Path | None = None) -> Tokenizer:
        """Read the tokenizer of a folder; one without generation_config.json stops where that of `model` says."""
        from tokenizers import Tokenizer as RustTokenizer

        if not (folder / "tokenizer.json").exists():
            raise UserError(
                f"{folder} has no tokenizer.json.",
                why="crosstune reads fast tokenizers only.",
                do="make one with: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
            )
        written = (folder / "tokenizer.json").read_bytes()
        try:
            rust = RustTokenizer.from_buffer(written)
        except ValueError as error:
            raise _damaged(folder / "tokenizer.json", str(error)) from error
        # The file may have truncation and padding settings; we do both elsewhere.
        rust.no_truncation()
        rust.no_padding()
        settings = _read(folder / "tokenizer_config.json")
        tokens = _read(folder / "special_tokens_map.json") | settings
        eos = _token_text(tokens.get("eos_token"))
        pad = _token_text(tokens.get("pad_token")) or eos
        bos = _token_text(tokens.get("bos_token"))
        return cls(
            rust=rust,
            chat_template=_chat_template(folder, settings),
            bos_token=bos,
            eos_token=eos,
            pad_id=(rust.token_to_id(pad) if pad else None) or 0,
            stop_ids=_stop_ids(_generation_folder(folder, model), rust, eos),
            special=tuple(t.content for t in rust.get_added_tokens_decoder().values() if t.special),
            adds_bos=bos is not None and rust.encode("a").ids[:1] == [rust.token_to_id(bos)],
            digest=hashlib.sha256(written).hexdigest(),
        )

    def check_fits(self, vocab_size: int, *, source: str) -> None:
        """Raise a UserError when a token has no embedding in the model; `source` names the tokenizer."""
        highest = max(self.rust.get_vocab(with_added_tokens=True).values())
        if highest >= vocab_size:
            raise UserError(
                f"The tokenizer {source} does not fit the model.",
                why=f"its highest token id is {highest}, and the model has embeddings for {vocab_size} tokens.",
                do="use a tokenizer without added tokens, or save the model with more embeddings (resize_token_embeddings)",
            )

    @property
    def leading_bos(self) -> str:
        """The BOS token to put before a text that no template rendered, or an empty string."""
        return self.bos_token if self.adds_bos and self.bos_token else ""

    def encode(self, text: str) -> Encoding:
        """Return token ids with their offsets. Adds no special tokens, since templates write their own."""
        return self.rust.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode several texts on all cores."""
        return self.rust.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        return str(self.rust.decode(list(ids), skip_special_tokens=not keep_special))


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise _damaged(path, "it does not hold a JSON object")
    return settings


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} cannot be read.", why=f"{why.rstrip('.')}.", do="download or copy the file again"
    )


def _token_text(entry: Any) -> str | None:
    return entry.get("content") if isinstance(entry, dict) else entry


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(file, f"it is not UTF-8 text ({error})") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


def _generation_folder(folder: Path, model: Path | None) -> Path:
    return folder if model is None or (folder / GENERATION).exists() else model


def _stop_ids(folder: Path, rust: RustTokenizer, eos: str | None) -> frozenset[int]:
    declared = _read(folder / GENERATION).get("eos_token_id")
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(rust.token_to_id(eos) if eos else None)
    return frozenset(token for token in ids if token is not None)
