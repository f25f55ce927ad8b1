"""Write the prompt of an item. What items share comes first, so that a judge can compute it once."""

from __future__ import annotations

from typing import Any

from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.verdicts import VerdictFormat

Messages = list[dict[str, Any]]


def prompt_messages(item: Item, verdict: VerdictFormat) -> Messages:
    """Return the conversation before the verdict: the data's own, or one made from the fields of the item."""
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
    """Return the whole conversation. A verdict that the data has written is kept as it is."""
    label = verdict.labels.texts[verdict.label_of(item)]
    said = item.verdict or verdict.write(label, item)
    return [*prompt_messages(item, verdict), {"role": "assistant", "content": said}]


def open_messages(item: Item, verdict: VerdictFormat, *, label: str) -> Messages:
    """Return the conversation with any label in the place of the verdict, for a judge to fill in."""
    return [*prompt_messages(item, verdict), {"role": "assistant", "content": verdict.write(label)}]
