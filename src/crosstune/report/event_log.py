"""List the events of a run, one row per event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from crosstune.core.events import (
    CheckpointFailed,
    Failed,
    Interrupted,
    Moved,
    NonFinite,
    Profiled,
    Started,
    Stopped,
    Warned,
)
from crosstune.core.tracking_events import TrackingFailed
from crosstune.report.files import RunFiles, is_adjustment, mapping, number
from crosstune.report.quantity import Shown, is_flat, label_of, read_time, show_named, show_seconds, show_time

NOTABLE_KINDS = frozenset(
    event.kind
    for event in (
        Warned,
        Failed,
        Stopped,
        Interrupted,
        NonFinite,
        CheckpointFailed,
        Moved,
        TrackingFailed,
    )
)
MOST_EVENTS = 400


@dataclass(frozen=True, kw_only=True)
class EventRow:
    time: Shown
    kind: str
    text: str
    notable: bool


def event_rows(run: RunFiles) -> list[EventRow]:
    start = read_time(run.plan.get("created"))
    return [row for event in run.events for row in _event_rows(event, start)]


def _event_rows(event: Mapping[str, Any], start: datetime | None) -> Iterator[EventRow]:
    """Yield the row of an event, and one for each warning about the data that it holds."""
    kind, moment = str(event.get("kind", "event")), _event_time(number(event.get("time")), start)
    warns = is_adjustment(event) and event.get("sort") == Warned.kind
    yield EventRow(
        time=moment,
        kind=Warned.kind if warns else kind,
        text=str(event.get("sentence")) if warns else _event_text(event),
        notable=warns or kind in NOTABLE_KINDS,
    )
    warnings = mapping(event.get("data")).get("warnings") if kind == Started.kind else None
    for sentence in warnings if isinstance(warnings, list) else ():
        yield EventRow(time=moment, kind=Warned.kind, text=str(sentence), notable=True)


def _event_time(seconds: float | None, start: datetime | None) -> Shown:
    if seconds is None or not 0 <= seconds < 1e11:
        return Shown("–")
    moment = datetime.fromtimestamp(seconds, tz=start.tzinfo if start else timezone.utc)
    if start is None or moment < start:
        return show_time(moment)
    return Shown(f"+{show_seconds((moment - start).total_seconds()).text}", moment.isoformat())


def _event_text(event: Mapping[str, Any]) -> str:
    """Return the event's message, or its values as a list when it has none."""
    for name in ("message", "error", "reason"):
        if event.get(name) and not is_adjustment(event):
            return str(event[name])
    if event.get("kind") == Profiled.kind:
        return f"see {event.get('path', 'its files')}"
    if event.get("kind") == Moved.kind:
        return _move_text(event)
    words = []
    for name, value in event.items():
        if name in ("time", "kind"):
            continue
        if name == "samples" and isinstance(value, list):
            words.append(f"{len(value)} samples")
        elif isinstance(value, Mapping):
            words += [
                f"{label_of(str(key))} {show_named(str(key), item).text}"
                for key, item in value.items()
                if is_flat(item)
            ]
        else:
            words.append(f"{label_of(name)} {show_named(name, value).text}")
    return " · ".join(words)


def _move_text(event: Mapping[str, Any]) -> str:
    sides = [event.get(name) for name in ("from", "to")]
    losses = [
        f"{side.get('loss')} on {side.get('backend')} ({side.get('precision')}, {side.get('quantization') or 'not quantized'})"
        for side in sides
        if isinstance(side, Mapping)
    ]
    return f"loss of the same batches: {', '.join(losses)}; relative difference {event.get('difference')}"
