"""Write every judged item to a file, and read such a file back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.core.json_files import parse_json, write_json
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.recipes.judge.items import WINNERS, Item
from crosstune.recipes.judge.judge import Judgement

FILE = "test_predictions.json"
METRICS_FILE = "test_metrics.json"
_LIMIT_BYTES = 1 << 30


def prediction_row(item: Item, found: Judgement) -> dict[str, Any]:
    """Return an item with its verdict, as it is written."""
    row: dict[str, Any] = {"id": item.id, "group": item.group, "task": item.task}
    if item.is_pair:
        row |= {"answer_a": item.answers[0], "answer_b": item.answers[1]}
        row |= {"expected": item.winner, "predicted": found.winner, "consistent": found.consistent}
    else:
        row |= {"answer": item.answers[0], "expected": item.score, "predicted": found.score}
    return row | {
        "reference": item.reference,
        "critique": item.critique,
        "readable": found.is_parsed,
        "confidence": found.confidence,
        "probabilities": list(found.probabilities),
        "text": found.text,
        "issues": list(found.issues),
        "feedback": found.feedback,
    }


def write_predictions(path: Path, items: Sequence[Item], found: Sequence[Judgement]) -> None:
    write_json(path, [prediction_row(item, one) for item, one in zip(items, found, strict=True)])


def read_predictions(path: Path) -> tuple[list[Item], list[Judgement]]:
    """Read a file of predictions with the labels of people."""
    try:
        rows = parse_json(read_plain_text(path, limit=_LIMIT_BYTES))
    except UnreadableFile as error:
        raise UserError(f"Cannot read the predictions {path}.", why=error.why, do=error.do) from error
    except ValueError as error:
        raise UserError(f"The predictions {path} are not JSON.", why=str(error)) from error
    if not isinstance(rows, list) or not rows:
        raise UserError(
            f"There are no predictions in {path}.",
            why="it is empty." if rows in ([], None) else "it is not a list.",
            do="write one with `crosstune judge eval RUN`",
        )
    pairs = [_read_row(row, f"Row {number} of {path}") for number, row in enumerate(rows, start=1)]
    if len({item.is_pair for item, _ in pairs}) > 1:
        raise UserError(f"{path} mixes scores with winners.", do="put them into two files")
    return [item for item, _ in pairs], [found for _, found in pairs]


def _read_row(row: Any, place: str) -> tuple[Item, Judgement]:
    if not isinstance(row, dict) or "predicted" not in row or row.get("expected") is None:
        raise UserError(f"{place} is no prediction.", why="it needs `expected` and `predicted`.")
    expected, predicted = row["expected"], row["predicted"]
    is_pair = expected in WINNERS
    fits = predicted is None or (predicted in WINNERS if is_pair else _is_number(predicted))
    if not (is_pair or _is_number(expected)) or not fits:
        raise UserError(
            f"{place} is no prediction.",
            why=f"expected {expected!r:.40} and predicted {predicted!r:.40} do not fit.",
        )
    answers = (
        (str(row.get("answer_a", "")), str(row.get("answer_b", "")))
        if is_pair
        else (str(row.get("answer", "")),)
    )
    item = Item(
        id=str(row.get("id", "")),
        group=str(row.get("group", row.get("id", ""))),
        task=str(row.get("task", "")),
        answers=answers,
        reference=str(row.get("reference") or ""),
        critique=str(row.get("critique") or ""),
        score=None if is_pair else float(expected),
        winner=expected if is_pair else None,
    )
    confidence = row.get("confidence")
    found = Judgement(
        score=None if is_pair or predicted is None else float(predicted),
        winner=predicted if is_pair else None,
        consistent=row.get("consistent") if is_pair else None,
        confidence=float(confidence) if confidence is not None and _is_number(confidence) else None,
        text=str(row.get("text") or ""),
        feedback=str(row.get("feedback") or ""),
    )
    return item, found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
