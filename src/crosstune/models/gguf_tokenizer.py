"""Write a folder's tokenizer into a GGUF file: vocabulary, splitting rules, special tokens and chat template.

The kind of tokenizer is found by the rules in tokenizer.json. A check in llama.cpp proves it (results/gguf_check.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crosstune.files.json_fields import FLAG, NOTHING, OBJECT, TEXT, check_fields, list_of, object_with, whole
from crosstune.files.json_files import read_json, read_object
from crosstune.files.plain_files import read_plain_text
from crosstune.models.gguf_families import unsupported
from crosstune.models.gguf_metadata import CONTROL, NORMAL, ROLES, UNUSED, USER_DEFINED
from crosstune.models.llama_layout import CHAT_TEMPLATE

if TYPE_CHECKING:
    from gguf import GGUFWriter

_UNKNOWN, _BYTE = 2, 6
_LOWEST = -1e6
_TOKENIZER = {
    "model": object_with({"type": TEXT | NOTHING}),
    "added_tokens": list_of(object_with({"content": TEXT, "id": whole(0), "special": FLAG})),
    "pre_tokenizer": OBJECT | NOTHING,
    "normalizer": OBJECT | NOTHING,
}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"<C>|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"<C>|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: dict[tuple[str, ...], tuple[str, str]] = {
    (_GPT2,): ("gpt-2", "gpt-2"),
    (r"\p{N}", _GPT2): ("smollm", "smollm"),
    (_WORDS % r"\p{N}{1,3}",): ("dbrx", "llama-bpe"),
    (_WORDS % r"\p{N}",): ("qwen2", "qwen2"),
    (_MARKS,): ("qwen35", "qwen35"),
    (_CASES % ("", "", r"\p{N}"),): ("tekken", "tekken"),
    (_CASES % ("<C>?", "<C>?", r"\p{N}{1,3}"),): ("gpt-4o", "gpt-4o"),
    _DEEPSEEK: ("deepseek-v3", "deepseek-v3"),
}
"""Patterns that split text in turn -> llama.cpp's name for them: with merges inside a word, and with ignore_merges."""
_SPELLINGS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)": "<C>",
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])": "<C>",
    r"'(?i:[sdmt]|ll|ve|re)": "<C>",
    "\r": r"\r",
    "\n": r"\n",
    "?+": "?",
    "++": "+",
    r"\s*[\r\n]|": r"\s*[\r\n]+|",
}
"""Equivalent spellings of a part of a pattern."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of a tokenizer in llama.cpp."""

    model: str
    """gpt2 (byte-level BPE) or llama (SentencePiece BPE)."""
    pre: str = "default"
    prefix: str = "never"
    """The place of a space before text: never, always, or first (at the beginning only)."""
    normalizes: bool = False
    """The tokenizer brings text into Unicode NFC, which llama.cpp does not."""


def read_tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise unsupported(folder, "it has no tokenizer.json")
    tokenizer = read_object(path, foreign=True, limit=256 << 20)
    check_fields(tokenizer, _TOKENIZER, required=("model",), source=path)
    return tokenizer


def find_kind(folder: Path, tokenizer: Mapping[str, Any]) -> Kind:
    """Return the kind of a tokenizer by its own rules; raise a UserError if llama.cpp has no such kind."""
    model = tokenizer["model"]
    normalizers = _parts(tokenizer.get("normalizer"), "normalizers")
    splitters = _parts(tokenizer.get("pre_tokenizer"), "pretokenizers")
    forms = [each["type"] for each in normalizers]
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        scheme = next((each.get("prepend_scheme") for each in splitters if each["type"] == "Metaspace"), None)
        prefix = "always" if "Prepend" in forms else scheme or "never"
        if set(forms) <= {"Prepend", "Replace"}:
            return Kind(model="llama", prefix=prefix)
    elif model.get("type") == "BPE" and forms in ([], ["NFC"]):
        names = SPLITS.get(tuple(_pattern(each) for each in splitters if _pattern(each)))
        if names is not None:
            pre = names[bool(model.get("ignore_merges"))]
            return Kind(model="gpt2", pre=pre, normalizes=forms == ["NFC"])
    kinds = [each["type"] for each in splitters]
    raise unsupported(
        folder,
        f"its tokenizer ({model.get('type')}) splits text with {kinds} and normalizes with {forms}, "
        f"which llama.cpp does not; supported: {', '.join(sorted({name for pair in SPLITS.values() for name in pair}))}"
        " and BPE of SentencePiece",
    )


def _parts(given: Mapping[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, without the nesting of Sequence."""
    if not given:
        return []
    if given.get("type") == "Sequence":
        return [part for each in given.get(inside) or () for part in _parts(each, inside)]
    return [dict(given)]


def _pattern(part: Mapping[str, Any]) -> str:
    """Return the pattern by which a step splits text, in one spelling; empty if it does not split."""
    if part["type"] == "ByteLevel":
        if part.get("add_prefix_space"):
            return "a space before the text"
        return _GPT2 if part.get("use_regex", True) else ""
    if part["type"] == "Digits":
        return r"\p{N}" if part.get("individual_digits") else r"\p{N}+"
    pattern = part.get("pattern")
    if part["type"] != "Split" or not isinstance(pattern, dict) or "Regex" not in pattern:
        return str(part["type"])
    if part.get("behavior") not in ("Isolated", "Removed") or (part["behavior"] == "Removed") != bool(
        part.get("invert")
    ):
        return f"Split {part.get('behavior')}"
    text = str(pattern["Regex"])
    for spelling, chosen in _SPELLINGS.items():
        text = text.replace(spelling, chosen)
    return text


def add_tokenizer(writer: GGUFWriter, folder: Path, *, num_rows: int, adds_bos: bool = True) -> None:
    """Add the tokenizer of a folder to a GGUF file; embedding rows without a token get a name too. Unless `adds_bos`, readers
    of the file add no BOS token to text, even if the tokenizer does."""
    from tokenizers import Tokenizer

    tokenizer = read_tokenizer(folder)
    model, added = tokenizer["model"], tokenizer.get("added_tokens", [])
    kind = find_kind(folder, tokenizer)
    vocab = model["vocab"]
    ids = {**vocab, **{token["content"]: token["id"] for token in added}}
    if max(ids.values(), default=0) >= num_rows:
        raise unsupported(folder, f"its tokenizer has tokens beyond the {num_rows:,} embeddings")
    by_id = {number: token for token, number in ids.items()}
    types = dict.fromkeys(by_id, NORMAL)
    if kind.model != "gpt2":
        types |= {
            number: _BYTE
            for token, number in vocab.items()
            if len(token) == 6 and token[:3] == "<0x" and token[-1] == ">"
        }
    types |= {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    settings = read_json(folder / "special_tokens_map.json", foreign=True)
    settings |= read_json(folder / "tokenizer_config.json", foreign=True)
    special = {role: ids[text] for role in ROLES if (text := _text(settings, role)) in ids}
    if kind.model != "gpt2" and "unk" in special:
        types[special["unk"]] = _UNKNOWN
    writer.add_tokenizer_model(kind.model)
    writer.add_tokenizer_pre(kind.pre)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(num_rows)])
    writer.add_token_types([types.get(number, UNUSED) for number in range(num_rows)])
    if kind.model == "gpt2":
        writer.add_token_merges(
            [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
        )
    else:
        scores = _scores(model)
        writer.add_token_scores([scores.get(by_id.get(number, ""), _LOWEST) for number in range(num_rows)])
        writer.add_add_space_prefix(kind.prefix == "always")
    for role, number in special.items():
        writer.add_uint32(f"tokenizer.ggml.{ROLES[role]}_token_id", number)
    _add_stops(writer, folder, special.get("eos"))
    first = Tokenizer.from_str(json.dumps(tokenizer)).encode("a").ids[:1]
    writer.add_add_bos_token(adds_bos and "bos" in special and first == [special["bos"]])
    writer.add_add_eos_token(False)
    if _strips_like_phi3(added):
        writer.add_name("Phi-3")  # llama.cpp lets this name remove white space after special tokens
    template = read_template(folder, settings)
    if template:
        writer.add_chat_template(template)


def read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template of a folder, from its file or its tokenizer settings."""
    jinja = folder / CHAT_TEMPLATE
    found = read_plain_text(jinja, limit=4 << 20) if jinja.is_file() else settings.get("chat_template")
    return found if isinstance(found, str) else None


def _text(settings: Mapping[str, Any], role: str) -> Any:
    token = settings.get(f"{role}_token")
    return token.get("content") if isinstance(token, dict) else token


def _scores(model: Mapping[str, Any]) -> dict[str, float]:
    """Return the score of each token. llama.cpp merges the pair whose result has the highest score."""
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(rank))
    return scores


def _add_stops(writer: GGUFWriter, folder: Path, eos: int | None) -> None:
    """Add the tokens that end an answer: llama.cpp has three places for them, and knows common end tokens by their text."""
    declared = read_json(folder / "generation_config.json", foreign=True).get("eos_token_id")
    given = declared if isinstance(declared, list) else [declared]
    others = [token for token in given if isinstance(token, int) and token >= 0 and token != eos]
    stops = [*others[:2], *([eos] if eos is not None else [])]
    for role, token in zip(("eot", "eom"), stops, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)


def _strips_like_phi3(added: list[dict[str, Any]]) -> bool:
    plain = {"<unk>", "<s>", "<|endoftext|>"}
    names = {token["content"]: bool(token.get("rstrip")) for token in added}
    if not {*plain, "</s>"} <= names.keys():
        return False
    return all(strips == (name not in plain) for name, strips in names.items())
