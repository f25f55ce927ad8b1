"""Write predictions, the judged items of a test, and read them back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.json_files import parse_json, write_json
from crosstune.files.plain_files import UnreadableFile, read_plain_text
from crosstune.recipes.judge.items import WINNERS, Item, Scale, common_scale, read_scale
from crosstune.recipes.judge.judge import Judgement
from crosstune.recipes.judge.verdicts import is_number

_LIMIT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Judged items, read from a file."""

    items: Sequence[Item]
    found: Sequence[Judgement]
    others: Mapping[str, Sequence[Judgement]]
    """Baseline -> its verdicts; empty if the file has none, or not for every item."""
    scale: Scale


def prediction_row(item: Item, found: Judgement) -> dict[str, Any]:
    """Return an item with its verdict as a row."""
    row: dict[str, Any] = {"id": item.id, "group": item.group, "task": item.task}
    if item.is_pair:
        row |= {"answer_a": item.answers[0], "answer_b": item.answers[1]}
        row |= {"expected": item.winner, "predicted": found.winner, "consistent": found.consistent}
        row |= {"rewards": list(found.rewards)} if found.rewards else {}
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


def write_predictions(
    path: Path,
    items: Sequence[Item],
    found: Sequence[Judgement],
    *,
    scale: Scale,
    others: Mapping[str, Sequence[Judgement]] | None = None,
) -> None:
    """Write every item with the verdicts of the judge and the baselines, so that metrics can be computed again."""
    rows = []
    for place, (item, one) in enumerate(zip(items, found, strict=True)):
        row = prediction_row(item, one)
        if not item.is_pair:
            row["score_scale"] = str(scale)
        row["baselines"] = {name: _short_row(verdicts[place]) for name, verdicts in (others or {}).items()}
        rows.append(row)
    write_json(path, rows)


def _short_row(found: Judgement) -> dict[str, Any]:
    row = {
        "predicted": found.score if found.winner is None else found.winner,
        "confidence": found.confidence,
        "consistent": found.consistent,
        "rewards": list(found.rewards) or None,
        "text": found.text,
        "feedback": found.feedback,
    }
    return {name: value for name, value in row.items() if value not in (None, "") or name == "predicted"}


def read_predictions(path: Path, *, scale: Scale, scale_asked: bool = False) -> Predictions:
    """Read a predictions file. `scale` applies to rows without one, or to every row if `scale_asked`."""
    try:
        text = read_plain_text(path, limit=_LIMIT_BYTES)
        rows = parse_json(text) if text.strip() else []
        why = (
            "it is not a list." if rows and not isinstance(rows, list) else "it is empty." if not rows else ""
        )
    except UnreadableFile as error:
        raise UserError(f"Cannot read the predictions {path}.", why=error.why, do=error.do) from error
    except ValueError as error:
        why = f"it is not JSON: {error}."
    if why:
        raise UserError(
            f"There are no predictions in {path}.",
            why=why,
            do="pass a file like a run's test_predictions.json: a list of rows with `expected` and `predicted`",
        )
    pairs = [_read_row(row, f"Row {number} of {path}") for number, row in enumerate(rows, start=1)]
    if len({item.is_pair for item, _ in pairs}) > 1:
        raise UserError(f"{path} mixes scores with winners.", do="put them into two files")
    items, found = [item for item, _ in pairs], [one for _, one in pairs]
    scale = scale if scale_asked else common_scale(items, default=scale)
    for item, one in pairs:
        for score in (item.score, one.score):
            if score is not None and not scale.holds(score):
                raise UserError(
                    f"The score {score:g} of the item {item.id} is outside the scale {scale}.",
                    do="set the scale of the predictions with --score_scale LOW-HIGH",
                )
    return Predictions(items=items, found=found, others=_read_others(rows, path), scale=scale)


def _read_others(rows: Sequence[Mapping[str, Any]], path: Path) -> dict[str, list[Judgement]]:
    """Return the verdicts of baselines that are in every row."""
    listed = [each if isinstance(each := row.get("baselines"), dict) else {} for row in rows]
    names = [name for name in listed[0] if all(isinstance(each.get(name), dict) for each in listed)]
    return {
        name: [
            _read_verdict(each[name], row["expected"] in WINNERS, f"Row {number} of {path}")
            for number, (row, each) in enumerate(zip(rows, listed, strict=True), start=1)
        ]
        for name in names
    }


def _read_row(row: Any, place: str) -> tuple[Item, Judgement]:
    if not isinstance(row, dict) or "predicted" not in row or row.get("expected") is None:
        raise UserError(f"{place} is not a prediction.", why="it needs `expected` and `predicted`.")
    expected, is_pair = row["expected"], row["expected"] in WINNERS
    if not (is_pair or is_number(expected)):
        raise UserError(
            f"{place} is not a prediction.",
            why=f"expected is {expected!r:.40}, neither a score nor a winner.",
        )
    answers = ("answer_a", "answer_b") if is_pair else ("answer",)
    item = Item(
        id=str(row.get("id", "")),
        group=str(row.get("group", row.get("id", ""))),
        task=str(row.get("task", "")),
        answers=tuple(str(row.get(name, "")) for name in answers),
        reference=str(row.get("reference") or ""),
        critique=str(row.get("critique") or ""),
        score=None if is_pair else float(expected),
        scale=read_scale(str(row["score_scale"])) if row.get("score_scale") else None,
        winner=expected if is_pair else None,
    )
    return item, _read_verdict(row, is_pair, place)


def _read_verdict(row: Mapping[str, Any], is_pair: bool, place: str) -> Judgement:
    predicted, confidence = row.get("predicted"), row.get("confidence")
    if predicted is not None and not (predicted in WINNERS if is_pair else is_number(predicted)):
        raise UserError(
            f"{place} is not a prediction.",
            why=f"predicted is {predicted!r:.40}, and expected is a {'winner' if is_pair else 'score'}.",
        )
    # A baseline's score may leave the scale a little. Sums of squares of larger numbers overflow.
    for name, value, most in (("predicted", predicted, 1e9), ("confidence", confidence, 1.0)):
        if is_number(value) and not -most <= value <= most:
            why = f"{name} is {value!r:.40}, more than {most:g}."
            raise UserError(f"{place} is not a prediction.", why=why)
    rewards = row.get("rewards") or ()
    if not (isinstance(rewards, (list, tuple)) and len(rewards) in (0, 2) and all(map(is_number, rewards))):
        raise UserError(f"{place} is not a prediction.", why=f"rewards is {rewards!r:.40}, not two numbers.")
    return Judgement(
        rewards=tuple(map(float, rewards)),
        score=None if is_pair or predicted is None else float(predicted),
        winner=predicted if is_pair else None,
        consistent=row.get("consistent") if is_pair else None,
        confidence=float(confidence) if is_number(confidence) else None,
        text=str(row.get("text") or ""),
        feedback=str(row.get("feedback") or ""),
    )
