"""Load the tokenizer of a model folder; convert text to token ids with offsets, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.core.errors import UserError
from crosstune.data.render_types import ChatTokens

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as RustTokenizer


_NAMES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


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
    other_named: tuple[tuple[str, str], ...] = ()
    """The special tokens that chat templates know by name, besides bos_token and eos_token: (name, text)."""
    digest: str = ""
    """sha256 of tokenizer.json."""
    template_file: str = ""
    """The file that holds the chat template."""

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
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
            stop_ids=_stop_ids(folder, rust, eos),
            special=tuple(t.content for t in rust.get_added_tokens_decoder().values() if t.special),
            adds_bos=bos is not None and rust.encode("a").ids[:1] == [rust.token_to_id(bos)],
            other_named=tuple((name, text) for name in _NAMES if (text := _token_text(tokens.get(name)))),
            digest=hashlib.sha256(written).hexdigest(),
            template_file=str(_template_file(folder)),
        )

    @property
    def leading_bos(self) -> str:
        """The BOS token that a template must write for the tokens to begin as the tokenizer begins them, or an empty
        string."""
        return self.bos_token if self.adds_bos and self.bos_token else ""

    @cached_property
    def chat_tokens(self) -> ChatTokens:
        """What rendering a conversation needs."""
        stops = {self.decode([token], keep_special=True) for token in self.stop_ids} - {""}
        return ChatTokens(
            chat_template=self.chat_template,
            template_file=self.template_file,
            named_tokens=tuple(self.named_tokens.items()),
            leading_bos=self.leading_bos,
            special=self.special,
            stop_tokens=tuple(sorted(stops, key=lambda text: (-len(text), text))),
        )

    @property
    def named_tokens(self) -> dict[str, str]:
        """The special tokens under the names that chat templates know. A token that is not set is undefined there."""
        named = {"bos_token": self.bos_token, "eos_token": self.eos_token, **dict(self.other_named)}
        return {name: text for name, text in named.items() if text}

    def encode(self, text: str) -> Encoding:
        """Return token ids with their offsets. Adds no special tokens, since templates write their own."""
        return self.rust.encode(text, add_special_tokens=False)

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode several texts on all cores."""
        return self.rust.encode_batch(list(texts), add_special_tokens=False)

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of texts that no template rendered, each with one BOS token if the tokenizer adds it,
        and one EOS token.

        The tokenizer adds the BOS token itself: written as text, it would be the beginning, and the first word would
        lose the mark that some tokenizers give to the beginning.
        """
        bos, eos = (
            self.rust.token_to_id(text) if text else None for text in (self.bos_token, self.eos_token)
        )
        found = []
        for encoding in self.rust.encode_batch_fast(list(texts), add_special_tokens=True):
            ids = list(encoding.ids)
            # The text may have them already.
            if ids[:2] == [bos, bos]:
                del ids[0]
            if ids[-2:] == [eos, eos]:
                del ids[-1]
            elif eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
            found.append(ids)
        return found

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


def _template_file(folder: Path) -> Path:
    file = folder / "chat_template.jinja"
    return file if file.exists() else folder / "tokenizer_config.json"


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


def _stop_ids(folder: Path, rust: RustTokenizer, eos: str | None) -> frozenset[int]:
    declared = _read(folder / "generation_config.json").get("eos_token_id")
    ids = set(declared if isinstance(declared, list) else [declared])
    ids.add(rust.token_to_id(eos) if eos else None)
    return frozenset(token for token in ids if token is not None)
