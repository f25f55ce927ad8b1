"""Build the tables of the page: options, data, machine, planned and measured figures, and events."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
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
from crosstune.report.files import RunFiles, is_adjustment, listed, mapping, number
from crosstune.report.formatting import (
    MINUS,
    Shown,
    is_flat,
    label_of,
    read_time,
    show_bytes,
    show_count,
    show_named,
    show_number,
    show_option,
    show_rate,
    show_seconds,
    show_share,
    show_time,
)
from crosstune.report.outcome import devices, duration
from crosstune.tracking.tracker import TrackingFailed

Fact = tuple[str, Shown]
Row = dict[str, Any]
"""A row of a table for the templates."""
_NOTABLE = (Warned, Failed, Stopped, Interrupted, NonFinite, CheckpointFailed, Moved, TrackingFailed)
NOTABLE_KINDS = frozenset(event.kind for event in _NOTABLE)
SHOWN_APART = frozenset({"lengths", "example", "identity"})
"""Fields of the data's description that the page shows elsewhere."""


def header_facts(run: RunFiles) -> list[Fact]:
    """Return model, data, backend, method and duration for the page's header."""
    plan = run.plan
    model = mapping(plan.get("model")).get("name") or run.asked.get("model_name")
    data = mapping(plan.get("data"))
    data_set = data.get("dataset") or run.asked.get("dataset")
    engine = [
        word for word in (plan.get("engine"), plan.get("device")) if word and word != plan.get("backend")
    ]
    backend = plan.get("backend") or run.summary.get("backend") or run.asked.get("backend")
    method = [word for word in (plan.get("method"), plan.get("quantizer")) if word and word != "none"]
    world = number(plan.get("world_size"))
    created = read_time(plan.get("created"))
    facts: list[tuple[str, Any]] = [
        ("Model", model),
        ("Data set", data_set),
        ("Backend", f"{backend} ({', '.join(map(str, engine))})" if backend and engine else backend),
        ("Method", " + ".join(map(str, method)) or run.asked.get("train_type")),
        ("Precision", plan.get("precision") or run.asked.get("precision")),
        ("Processes", f"{world:.0f} over {plan.get('collective')}" if world and world > 1 else None),
        ("Continued", _continued(plan.get("resumed_from"))),
        ("Started", show_time(created) if created else plan.get("created")),
        ("Duration", duration(run)),
    ]
    return [
        (name, value if isinstance(value, Shown) else Shown(str(value))) for name, value in facts if value
    ]


def _continued(start: Any) -> str | None:
    """Describe the checkpoint that the run resumed from."""
    if not isinstance(start, Mapping) or "step" not in start:
        return None
    return f"from step {start['step']}, trained on {start.get('backend', '?')}"


def option_rows(run: RunFiles) -> list[Row]:
    """Return the requested options with the values that the run used."""
    used = mapping(run.plan.get("options"))
    return [
        {
            "name": name,
            "asked": show_option(asked),
            "used": show_option(used[name]) if name in used else Shown("not recorded"),
            "differs": name in used and used[name] != asked,
        }
        for name, asked in run.asked.items()
    ]


def unasked_options(run: RunFiles) -> list[Fact]:
    options = mapping(run.plan.get("options"))
    return [(name, show_option(value)) for name, value in options.items() if name not in run.asked]


def adjustment_rows(run: RunFiles) -> list[Row]:
    """Return the adjustments of the plan and of the run, without duplicates."""
    rows: dict[tuple[Any, ...], Row] = {}
    for item in map(mapping, [*listed(run.plan.get("adjustments")), *filter(is_adjustment, run.events)]):
        row = {
            "option": str(item.get("option", "")),
            "asked": show_option(item.get("asked")),
            "used": show_option(item.get("used")),
            "reason": str(item.get("reason", "")),
        }
        # In an event, `kind` is the kind of event and `sort` the kind of adjustment.
        rows.setdefault(
            tuple(row.values()), row | {"kind": str(item.get("sort") or item.get("kind", "change"))}
        )
    return list(rows.values())


def data_tables(data: Mapping[str, Any]) -> tuple[list[Fact], Row | None, list[tuple[str, str]]]:
    """Split the data's description into plain values, one table of its parts, and the rest as text."""
    data = {name: value for name, value in data.items() if name not in SHOWN_APART}
    facts = [(label_of(name), show_named(name, value)) for name, value in data.items() if is_flat(value)]
    parts = {
        name: value
        for name, value in data.items()
        if isinstance(value, Mapping) and value and all(map(is_flat, value.values()))
    }
    rest = [
        (label_of(name), json.dumps(value, ensure_ascii=False, indent=2, default=str))
        for name, value in data.items()
        if not is_flat(value) and name not in parts
    ]
    rows = [
        (
            label_of(name),
            [show_named(name, part[name]) if name in part else Shown("–") for part in parts.values()],
        )
        for name in dict.fromkeys(name for part in parts.values() for name in part)
    ]
    return facts, {"columns": list(map(label_of, parts)), "rows": rows} if parts else None, rest


def masked_example(data: Mapping[str, Any]) -> Row | None:
    """Return an example in pieces, each with whether it is supervised; None if no example is recorded."""
    found = mapping(data.get("example"))
    pieces = [
        (str(piece.get("text", "")), piece.get("supervised") is True)
        for piece in map(mapping, listed(found.get("pieces")))
    ]
    if not any(text for text, _ in pieces):
        return None
    return {"pieces": pieces} | {name: int(number(found.get(name)) or 0) for name in ("row", "tokens")}


def machine_facts(run: RunFiles) -> list[Fact]:
    machine = mapping(run.plan.get("machine"))
    facts = [
        (label, show_named(name, machine[name]))
        for name, label in (
            ("name", "Computer"),
            ("system", "System"),
            ("processor", "Processor"),
            ("num_cores", "Cores"),
        )
        if machine.get(name)
    ]
    memory = number(machine.get("memory_total_bytes"))
    if memory:
        facts.append(("Memory", show_bytes(memory)))
    for index, device in enumerate(devices(run)):
        size = number(device.get("memory_total_bytes"))
        text = f"{device.get('name', 'unnamed')}" + (f", {show_bytes(size).text}" if size else "")
        facts.append((f"Device {index}", Shown(text, show_bytes(size).full if size else "")))
    return facts


def version_facts(run: RunFiles) -> list[Fact]:
    versions = mapping(mapping(run.plan.get("machine")).get("versions"))
    return [(str(name), show_option(version)) for name, version in versions.items()]


def identity_facts(run: RunFiles) -> list[Fact]:
    """Return the source of the weights and the paths of the results."""
    model = mapping(run.plan.get("model"))
    facts = [(f"model {name}", show_option(model[name])) for name in ("path", "source") if model.get(name)]
    facts += [
        (f"model {label_of(name)}", show_option(value))
        for name, value in mapping(model.get("identity")).items()
    ]
    if identity := mapping(run.plan.get("data")).get("identity"):
        facts.append(("data identity", show_option(identity)))
    return facts + [
        (name, show_option(run.summary[name])) for name in ("checkpoint", "result") if run.summary.get(name)
    ]


def reproduce_command(run: RunFiles) -> str:
    """Return the run's command quoted for a shell, one flag per line; empty when it was not recorded."""
    words = run.plan.get("command")
    if not isinstance(words, list):
        return str(words or "")
    quoted = [shlex.quote(str(word)) for word in words]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in quoted).strip()


def plan_against_measured(run: RunFiles) -> list[Row]:
    """Return each planned figure with the measured one."""
    plan, summary = run.plan, run.summary
    estimate = mapping(plan.get("estimate"))
    steps = number(summary.get("steps"))
    figures = [
        (
            "Peak memory",
            number(plan.get("estimated_bytes")) or number(estimate.get("bytes")),
            number(summary.get("peak_memory_bytes")),
            show_bytes,
        ),
        (
            "Steps",
            number(plan.get("num_steps")),
            float(run.last_step) if steps is None else steps,
            show_count,
        ),
        ("Speed", number(estimate.get("tokens_per_s")), number(summary.get("tokens_per_s")), show_rate),
        ("Time", number(estimate.get("seconds")), number(summary.get("seconds")), show_seconds),
    ]
    return [
        {
            "label": label,
            "planned": show(planned),
            "measured": Shown("not yet") if measured is None else show(measured),
            "difference": _difference(planned, measured),
        }
        for label, planned, measured, show in figures
        if planned
    ]


def _difference(planned: float, measured: float | None) -> str:
    if measured is None or planned <= 0:
        return ""
    change = measured / planned - 1
    if abs(change) < 0.005:
        return "as planned"
    if change >= 1:
        return f"{show_number(1 + change, digits=2).text} times as much"
    return f"{'+' if change > 0 else MINUS}{show_share(abs(change)).text}"


def event_rows(run: RunFiles) -> list[Row]:
    """Return a row for each event, and one for each warning about the data."""
    start = read_time(run.plan.get("created"))
    return [row for event in run.events for row in _event_rows(event, start)]


def _event_rows(event: Mapping[str, Any], start: datetime | None) -> Iterator[Row]:
    kind, moment = str(event.get("kind", "event")), _event_time(number(event.get("time")), start)
    warns = is_adjustment(event) and event.get("sort") == Warned.kind
    yield {
        "time": moment,
        "kind": Warned.kind if warns else kind,
        "text": str(event.get("sentence")) if warns else _event_text(event),
        "notable": warns or kind in NOTABLE_KINDS,
    }
    for sentence in listed(mapping(event.get("data")).get("warnings")) if kind == Started.kind else ():
        yield {"time": moment, "kind": Warned.kind, "text": str(sentence), "notable": True}


def _event_time(seconds: float | None, start: datetime | None) -> Shown:
    if seconds is None or not 0 <= seconds < 1e11:
        return Shown("–")
    moment = datetime.fromtimestamp(seconds, tz=start.tzinfo if start else timezone.utc)
    if start is None or moment < start:
        return show_time(moment)
    return Shown(f"+{show_seconds((moment - start).total_seconds()).text}", moment.isoformat())


def _event_text(event: Mapping[str, Any]) -> str:
    """Return the event's message; without one, its values."""
    for name in ("message", "error", "reason"):
        if event.get(name) and not is_adjustment(event):
            return str(event[name])
    if event.get("kind") == Profiled.kind:
        return f"see {event.get('path', 'its files')}"
    if event.get("kind") == Moved.kind:
        losses = [
            f"{side.get('loss')} on {side.get('backend')} ({side.get('precision')}, {side.get('quantization') or 'not quantized'})"
            for side in (mapping(event.get(name)) for name in ("from", "to"))
        ]
        return f"loss of the same batches: {', '.join(losses)}; relative difference {event.get('difference')}"
    words = []
    for name, value in event.items():
        if name == "samples":
            words.append(f"{len(listed(value))} samples")
        elif isinstance(value, Mapping):
            words += [_named(str(key), item) for key, item in value.items() if is_flat(item)]
        elif name not in ("time", "kind"):
            words.append(_named(name, value))
    return " · ".join(words)


def _named(name: str, value: Any) -> str:
    return f"{label_of(name)} {show_named(name, value).text}"
