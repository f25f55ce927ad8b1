"""Write verdicts and prompts in each format, read verdicts from text, and store a judge's format."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from crosstune.core.errors import UserError
from crosstune.files.json_fields import FLAG, TEXT, Rule, check_fields, real
from crosstune.files.json_files import parse_json, read_json, write_json
from crosstune.recipes.judge.items import (
    WINNERS,
    Item,
    Labels,
    Scale,
    digit_labels,
    number_labels,
    read_scale,
    write_number,
)

FORMATS = ("digit", "score", "result", "json", "winner")
NO_ISSUES = "none"

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_SCORE = re.compile(rf"score\s*[:=]\s*\**\s*{_NUMBER}\s*(?:/\s*{_NUMBER})?", re.I)
_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.S)
_RESULT = re.compile(rf"\[RESULT\]\s*\(?({_NUMBER}|A|B|C|tie)\b", re.I)
_ISSUES = re.compile(r"^issues\s*:\s*(.*)$", re.I | re.M)
_FEEDBACK = re.compile(r"^feedback\s*:\s*(.*)$", re.I | re.M)
_WINNER = re.compile(r"^\W*(?:(?:winner|verdict|answer|result)\s*:?\s*)?\W*(A|B|C|tie)\b", re.I)
SETTINGS_FILE = "judge.json"
_FIELDS = {
    "verdict": Rule(f"one of {', '.join(FORMATS)}", lambda value: value in FORMATS),
    "scale": TEXT,
    "explains": FLAG,
    "head": Rule("tokens or scalar", lambda value: value in ("tokens", "scalar")),
    "temperature": real(0),
}

Messages = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class VerdictFormat:
    """A format on a scale. A verdict is `before`, a label, `after`, and feedback at the end (in `result` at the start)."""

    name: str
    scale: Scale
    explains: bool = False
    """True if verdicts have issues and feedback."""

    @property
    def labels(self) -> Labels:
        if self.name == "winner":
            return Labels(texts=WINNERS)
        return digit_labels(self.scale) if self.name == "digit" else number_labels(self.scale)

    @property
    def before(self) -> str:
        return {"score": "Score: ", "result": "[RESULT] ", "json": '{"score": '}.get(self.name, "")

    @property
    def after(self) -> str:
        """The text after the label."""
        if self.name == "score":
            return f"/{write_number(self.scale.high)}"
        return ("," if self.explains else "}") if self.name == "json" else ""

    def settings(self, **more: Any) -> JudgeSettings:
        """Return the settings of a judge with this format."""
        return JudgeSettings(verdict=self.name, scale=str(self.scale), explains=self.explains, **more)

    def request(self) -> str:
        """Return the sentence of the prompt that asks for the verdict."""
        low, high = write_number(self.scale.low), write_number(self.scale.high)
        if self.name == "winner":
            said = "Which answer is better? Reply with A, B or tie"
            return f"{said}, then a line of feedback." if self.explains else f"{said}."
        if self.name == "digit":
            return "Rate the answer with one digit from 0 (worst) to 9 (best)."
        rate = f"Rate the answer from {low} (worst) to {high} (best)."
        shape = {
            "score": f"`Score: N/{high}`" + (", then its issues and feedback" if self.explains else ""),
            "result": ("feedback, then " if self.explains else "") + "`[RESULT] N`",
            "json": 'JSON with the key "score"' + (', and "issues" and "feedback"' if self.explains else ""),
        }[self.name]
        return f"{rate} Reply with {shape}."

    def write(self, label: str, item: Item | None = None) -> str:
        """Return the verdict with a label, and with the feedback of an item if the format has feedback."""
        said = f"{self.before}{label}{self.after}"
        if not self.explains or item is None:
            return said
        issues, feedback = "; ".join(item.issues) or NO_ISSUES, " ".join(item.critique.split())
        if self.name == "score":
            return f"{said}\nIssues: {issues}\nFeedback: {feedback}"
        if self.name == "result":
            return f"Feedback: {feedback or issues} {said}"
        if self.name == "json":
            rest = json.dumps({"issues": list(item.issues), "feedback": feedback}, ensure_ascii=False)
            return f"{said} {rest[1:]}"
        return f"{said}\nFeedback: {feedback}" if self.name == "winner" else said

    def label_of(self, item: Item) -> int:
        """Return the index of the label nearest to the reference score, or of the reference winner."""
        if item.winner is not None:
            return WINNERS.index(item.winner)
        assert item.score is not None
        return self.labels.neighbors(item.score)[0]

    def read(self, text: str) -> TextVerdict:
        """Read a generated verdict; the score is None if it is outside the scale."""
        if self.name == "digit":
            digit = re.match(r"\s*(\d)(?!\d)", text)
            return TextVerdict(score=self.labels.values[int(digit[1])] if digit else None)
        if self.name == "winner":
            return _read_winner(text)
        found = _read_json(text) if self.name == "json" else parse_text_verdict(text)
        on_scale = found.score is not None and self.scale.holds(found.score)
        if on_scale and found.out_of in (None, self.scale.high):
            return found
        return TextVerdict(issues=found.issues, feedback=found.feedback)


def choose_format(name: str, *, scale: Scale, items: list[Item]) -> VerdictFormat:
    """Return the format of --verdict; `auto` chooses it by the data."""
    pairs = items[0].is_pair
    explained = any(item.critique or item.issues for item in items)
    if name == "auto":
        written = any(item.messages for item in items)
        name = "winner" if pairs else _format_of(items[0].verdict) if written else "digit"
    elif own := {_format_of(item.verdict) for item in items if item.verdict} - {name}:
        raise UserError(
            f"--verdict {name} does not match the data.",
            why=f"its conversations end with verdicts in the format {', '.join(sorted(own))}.",
            do="remove --verdict",
        )
    if pairs != (name == "winner"):
        raise UserError(
            f"--verdict {name} does not match the data.",
            why="its rows are " + ("pairs of answers." if pairs else "single answers with a score."),
            do="use --verdict winner" if pairs else "use --verdict digit, score, result or json",
        )
    return VerdictFormat(name=name, scale=scale, explains=explained and name != "digit")


def _format_of(verdict: str) -> str:
    if verdict.lstrip().startswith("{"):
        return "json"
    return "result" if _last_result(verdict) else "score"


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """The verdict format of a trained judge, stored in judge.json."""

    verdict: str
    scale: str
    explains: bool = False
    head: str = "tokens"
    temperature: float = 1.0
    """Divisor of the labels' log probabilities that calibrates the confidence; fitted on the validation items."""

    @property
    def is_reward(self) -> bool:
        """True for a reward model, trained on pairs: it gives an answer a reward without a scale."""
        return self.head == "scalar" and self.verdict == "winner"

    def format(self) -> VerdictFormat:
        return VerdictFormat(name=self.verdict, scale=read_scale(self.scale), explains=self.explains)

    def write(self, folder: Path) -> None:
        write_json(folder / SETTINGS_FILE, asdict(self))


def read_judge_settings(folder: Path) -> JudgeSettings | None:
    """Read the settings in the folder of a judge's weights; None if there are none."""
    path = folder / SETTINGS_FILE
    if not path.is_file():
        return None
    written = read_json(path)
    check_fields(written, _FIELDS, source=path, required=("verdict", "scale"), do="train the judge again")
    return JudgeSettings(**{name: written[name] for name in _FIELDS if name in written})


def prompt_messages(item: Item, verdict: VerdictFormat) -> Messages:
    """Return the conversation before the verdict: the one in the data, or one made from the fields of the item."""
    if item.messages:
        return [dict(message) for message in item.messages]
    parts = [verdict.request()]
    if item.rubric:
        parts.append(f"Rubric: {item.rubric}")
    parts.append(f"Task: {item.task}")
    if item.reference:
        parts.append(f"Reference: {item.reference}")
    if item.is_pair:
        parts += [f"Answer A: {item.answers[0]}", f"Answer B: {item.answers[1]}"]
    else:
        parts.append(f"Answer: {item.answers[0]}")
    return [{"role": "user", "content": "\n".join(parts)}]


def training_messages(item: Item, verdict: VerdictFormat) -> Messages:
    """Return the conversation with its verdict: the one in the data, or one made from the label."""
    label = verdict.labels.texts[verdict.label_of(item)]
    said = item.verdict or verdict.write(label, item)
    return [*prompt_messages(item, verdict), {"role": "assistant", "content": said}]


@dataclass(frozen=True, kw_only=True)
class TextVerdict:
    """The score or winner read from a text, or None."""

    score: float | None = None
    out_of: float | None = None
    """The highest score, if the text states it."""
    winner: str | None = None
    issues: tuple[str, ...] = ()
    feedback: str = ""


def parse_text_verdict(text: str) -> TextVerdict:
    """Read `Score: N/10` with its issues and feedback, `[RESULT] n`, or a JSON verdict."""
    fenced = _FENCED.fullmatch(text.strip())
    if fenced is not None:
        text = fenced[1]
    if text.lstrip().startswith("{"):
        return _read_json(text)
    issues = _ISSUES.search(text)
    feedback, result = _FEEDBACK.search(text), _last_result(text)
    explained: dict[str, Any] = {
        "issues": _split_issues(issues[1]) if issues else (),
        "feedback": text[feedback.start(1) : _end_of(feedback, result)].strip() if feedback else "",
    }
    if match := result:
        winner = _winner_name(match[1])
        return TextVerdict(score=float(match[1]) if winner is None else None, winner=winner, **explained)
    if match := _SCORE.search(text):
        return TextVerdict(score=float(match[1]), out_of=float(match[2]) if match[2] else None, **explained)
    return TextVerdict(**explained)


def _last_result(text: str) -> re.Match[str] | None:
    """Return the `[RESULT] n` of a verdict: the last one, since the feedback before it may mention others. A verdict that
    starts with its score has none."""
    if _SCORE.match(text.lstrip(" \n*#")):
        return None
    return next(reversed(list(_RESULT.finditer(text))), None)


def _end_of(feedback: re.Match[str], result: re.Match[str] | None) -> int:
    """Return where the feedback ends: at the result, if it is in the same line."""
    inside = result is not None and feedback.start(1) <= result.start() < feedback.end(1)
    return result.start() if result is not None and inside else feedback.end(1)


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _read_json(text: str) -> TextVerdict:
    start, end = text.find("{"), text.rfind("}")
    try:
        fields = parse_json(text[start : end + 1], foreign=True) if 0 <= start < end else None
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        return TextVerdict()
    score, issues = fields.get("score"), fields.get("issues")
    if isinstance(score, str) and re.fullmatch(_NUMBER, score.strip()):
        score = float(score)
    return TextVerdict(
        score=float(score) if is_number(score) else None,
        winner=_winner_name(str(fields.get("winner", ""))),
        issues=tuple(map(str, issues)) if isinstance(issues, list) else (),
        feedback=str(fields.get("feedback") or ""),
    )


def _read_winner(text: str) -> TextVerdict:
    feedback = _FEEDBACK.search(text)
    said = feedback[1].strip() if feedback else ""
    if text.lstrip().startswith("{"):
        return _read_json(text)
    match = _WINNER.match(text.strip()) or _last_result(text)
    return TextVerdict(winner=_winner_name(match[1]) if match else None, feedback=said)


def _winner_name(text: str) -> str | None:
    return {"a": "A", "b": "B", "c": "tie", "tie": "tie"}.get(text.strip().lower())


def _split_issues(text: str) -> tuple[str, ...]:
    parts = tuple(part.strip() for part in text.split(";") if part.strip())
    return () if parts == (NO_ISSUES,) else parts
