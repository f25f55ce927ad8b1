"""Read crosstune.json, the record that crosstune writes beside an adapter or a model it made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.core.json_fields import NOTHING, OBJECT, TEXT, check_fields, list_of, whole
from crosstune.core.json_files import read_json
from crosstune.core.plain_files import UnreadableFile
from crosstune.core.quantization import wrong_spec

RECORD = "crosstune.json"
_FIELDS = {
    "base": OBJECT | NOTHING,
    "quantization": OBJECT | NOTHING,
    "precision": TEXT | NOTHING,
    "new_blocks": list_of(whole(0)),
    "converted": OBJECT | NOTHING,
    "exported": OBJECT | NOTHING,
    "against_trained": OBJECT | NOTHING,
    "chat_template": TEXT | NOTHING,
}
_BASE = {"name": TEXT | NOTHING, "identity": OBJECT | NOTHING}
_IDENTITY = {"version": whole(1) | NOTHING, "sha256": TEXT | NOTHING, "weights_sha256": TEXT | NOTHING}
_MADE = {
    "original": OBJECT | NOTHING,
    "source_identity": TEXT | NOTHING,
    "source_config": TEXT | NOTHING,
    "own_identity": TEXT | NOTHING,
}


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a folder; an empty one for a folder that crosstune did not write."""
    path = folder / RECORD
    record = read_json(path)
    check_fields(record, _FIELDS, source=path)
    wrong = wrong_spec(record.get("quantization"))
    if wrong is not None:
        raise UnreadableFile(path, f"quantization in it cannot be read: {wrong}")
    base = record.get("base") or {}
    check_fields(base, _BASE, source=path, place="base.")
    check_fields(base.get("identity") or {}, _IDENTITY, source=path, place="base.identity.")
    for made in ("converted", "exported"):
        check_fields(record.get(made) or {}, _MADE, source=path, place=f"{made}.")
        check_original((record.get(made) or {}).get("original"), path=path)
    return record


def check_original(original: dict[str, Any] | None, *, path: Path) -> None:
    """Check the record of the weights that were quantized: name, path and identity."""
    rules = {"name": TEXT, "path": TEXT, "identity": TEXT}
    if original is not None:
        check_fields(original, rules, required=tuple(rules), source=path, place="original.")
