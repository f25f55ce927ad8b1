"""Check the structure of a tokenizer.json: the parts, how much text can grow in them, and which need a trial."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from crosstune.core.json_fields import NOTHING, OBJECT, TEXT, list_of, map_of, object_with, whole, wrong_field

VOCABULARY_LIMIT = 4_000_000
PARTS_LIMIT = 100
LONGEST_PATTERN = 10_000
LARGEST_GROWTH = 256.0
"""The largest factor by which a normalizer or decoder may lengthen a text. Those in use stay far below."""
_LONGEST_REPLACEMENT = 200
_STAGES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_ID = whole(0, 2**31 - 1)
_IDS = map_of(_ID)
_FIELDS = {
    "model": OBJECT,
    "added_tokens": list_of(object_with({"content": TEXT, "id": _ID})),
    **dict.fromkeys(_STAGES, OBJECT | NOTHING),
}


def wrong_structure(tokenizer: Mapping[str, Any]) -> str | None:
    """Return why a tokenizer.json cannot be used; None when its structure is within the limits."""
    wrong = wrong_field(tokenizer, _FIELDS, required=("model",))
    if wrong is not None:
        return wrong
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, dict) and not _IDS.fits(vocabulary):
        return f"a token has a number that is not {_ID.needs}"
    if isinstance(vocabulary, (dict, list)) and len(vocabulary) > VOCABULARY_LIMIT:
        return f"its vocabulary has more than {VOCABULARY_LIMIT:,} entries"
    for stage in _STAGES:
        parts = list(_parts(tokenizer.get(stage)))
        if len(parts) > PARTS_LIMIT:
            return f"its {stage} has more than {PARTS_LIMIT} parts"
        growth = 1.0
        for part in parts:
            if len(_regex(part) or "") > LONGEST_PATTERN:
                return f"its {stage} has a pattern of more than {LONGEST_PATTERN:,} characters"
            growth *= _growth(part)
        if growth > LARGEST_GROWTH:
            return f"its {stage} can make a text more than {LARGEST_GROWTH:g} times as long"
    return None


def needs_trial(tokenizer: Mapping[str, Any]) -> bool:
    """Return whether a part has a pattern or a table of its own, whose time only a trial can show."""
    parts = [part for stage in _STAGES for part in _parts(tokenizer.get(stage))]
    return any(_regex(part) is not None or part.get("type") == "Precompiled" for part in parts)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield every object with a type in a stage, nested ones too; JSON from outside has a limited depth."""
    if isinstance(value, dict):
        if isinstance(value.get("type"), str):
            yield value
        for item in value.values():
            yield from _parts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _parts(item)


def _regex(part: Mapping[str, Any]) -> str | None:
    pattern = part.get("pattern")
    found = pattern.get("Regex") if isinstance(pattern, dict) else None
    return found if isinstance(found, str) else None


def _growth(part: Mapping[str, Any]) -> float:
    """Return how many times longer a part can make a text."""
    if part.get("type") == "Precompiled":
        return _table_growth(part.get("precompiled_charsmap"))
    content, pattern = part.get("content"), part.get("pattern")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1.0
    fixed = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(fixed, str) and fixed:
        return max(1.0, len(content) / len(fixed))
    return 1.0 + len(content)  # a regex may match between any two characters


def _table_growth(table: Any) -> float:
    """Return 1 when every replacement in a compiled table is short, as in Unicode's normal forms; else infinity."""
    try:
        raw = base64.b64decode(table, validate=True) if isinstance(table, str) else b""
    except binascii.Error:  # the tokenizer's own reader reports it
        return 1.0
    replacements = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return 1.0 if max(map(len, replacements), default=0) <= _LONGEST_REPLACEMENT else float("inf")
