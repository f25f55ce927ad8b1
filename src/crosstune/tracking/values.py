"""Choose and name what trackers receive of a run: numbers of steps and evaluations, rows of samples, the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from crosstune.core.json_files import finite
from crosstune.core.secrets import redact, redact_values

TRAIN, EVAL, TEST = "train", "eval", "test"
LONGEST_CELL = 4000
"""Characters of a text in a table."""
MOST_ROWS = 200
"""Rows of a table."""
_PLAN_FIELDS = (
    "options",
    "backend",
    "engine",
    "device",
    "method",
    "quantizer",
    "n_bits",
    "precision",
    "world_size",
    "attention",
    "num_steps",
)
_DATA_FIELDS = ("dataset", "format", "context_length", "train", "eval", "identity", "scale", "labels")


def numbers(kind: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among metrics, with names such as `train/loss`. What is unknown, such as the loss of a skipped
    step, is left out."""
    return {
        f"{kind}/{name}": _number(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, (bool, int, float))
    }


def _number(value: float) -> float:
    """Return a number that fits into 64 bits."""
    if isinstance(value, float):
        return value
    return int(value) if value.bit_length() < 64 else float(value)


def table_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for a table: the same columns in each, texts that UTF-8 can encode, no secrets."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: _cell(row.get(name)) for name in columns} for row in rows[:MOST_ROWS]]


def tracked_config(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what trackers are told of plan.json: options, model, data, backend and versions; not the machine's name,
    the command or the environment."""
    model = described.get("model") or {}
    data = described.get("data") or {}
    machine = described.get("machine") or {}
    chosen = {name: described.get(name) for name in _PLAN_FIELDS}
    chosen["model"] = {name: model.get(name) for name in ("name", "source") if name in model}
    chosen["data"] = {name: data[name] for name in _DATA_FIELDS if name in data}
    chosen["versions"] = machine.get("versions")
    return plain(chosen)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values in the types of JSON, in texts that UTF-8 can encode, without secrets."""
    made = _encodable(redact_values(finite(values)))
    assert isinstance(made, dict)
    return made


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _cell(value: Any) -> Any:
    value = finite(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, list):  # such as the states of an answer while it was made
        value = "\n".join(map(str, value))
    text = str(value)
    # Cut before the search for secrets, which takes time, but not through one.
    text = redact(text[: LONGEST_CELL + 500])
    if len(text) > LONGEST_CELL:
        text = f"{text[:LONGEST_CELL]} ..."
    return _encodable(text)
