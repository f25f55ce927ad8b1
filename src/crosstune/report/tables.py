"""Build the tables of the page: options, data, machine, planned and measured figures, and events."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
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
from crosstune.report.files import RunFiles, is_adjustment, is_running, listed, mapping, number
from crosstune.report.formatting import (
    MINUS,
    FormattedValue,
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

Fact = tuple[str, FormattedValue]
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
    dataset = data.get("dataset") or run.asked.get("dataset")
    engine = [
        word for word in (plan.get("engine"), plan.get("device")) if word and word != plan.get("backend")
    ]
    backend = plan.get("backend") or run.summary.get("backend") or run.asked.get("backend")
    method = [word for word in (plan.get("method"), plan.get("quantizer")) if word and word != "none"]
    world = number(plan.get("world_size"))
    created, start = read_time(plan.get("created")), mapping(plan.get("resumed_from"))
    facts: list[tuple[str, Any]] = [
        ("Model", model),
        ("Dataset", dataset),
        ("Backend", f"{backend} ({', '.join(map(str, engine))})" if backend and engine else backend),
        ("Method", " + ".join(map(str, method)) or run.asked.get("train_type")),
        ("Precision", plan.get("precision") or run.asked.get("precision")),
        ("Processes", f"{world:.0f} with {plan.get('collective')}" if world and world > 1 else None),
        ("Resumed", f"from step {start.get('step')}, trained on {start.get('backend')}" if start else None),
        ("Started", show_time(created) if created else plan.get("created")),
        ("Duration", duration(run)),
    ]
    return [
        (name, value if isinstance(value, FormattedValue) else FormattedValue(str(value)))
        for name, value in facts
        if value
    ]


def option_rows(run: RunFiles) -> list[Row]:
    """Return the requested options with the values used."""
    used = mapping(run.plan.get("options"))
    return [
        {
            "name": name,
            "asked": show_option(asked),
            "used": show_option(used[name]) if name in used else FormattedValue("not recorded"),
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


def data_facts(data: Mapping[str, Any]) -> tuple[list[Fact], list[Fact]]:
    """Return the plain values of the data's description, and the flattened values of its parts."""
    data = {name: value for name, value in data.items() if name not in SHOWN_APART}
    plain = [(label_of(name), show_named(name, value)) for name, value in data.items() if is_flat(value)]
    parts = flat({name: value for name, value in data.items() if not is_flat(value)})
    return plain, [(label_of(path.replace(".", " ")), show_named(path, value)) for path, value in parts]


def flat(values: Mapping[str, Any], *, of: str = "", levels: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield flattened names (`a.b`) and values."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value and levels:
            yield from flat(value, of=f"{of}{name}.", levels=levels - 1)
        else:
            yield f"{of}{name}", value


def masked_example(data: Mapping[str, Any]) -> Row | None:
    """Return the pieces of an example, each with a flag for supervision; None if no example is recorded."""
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
    labels = {"name": "Computer", "system": "System", "processor": "Processor", "num_cores": "Cores"}
    labels["memory_total_bytes"] = "Memory"
    facts = [(label, show_named(name, machine[name])) for name, label in labels.items() if machine.get(name)]
    for index, device in enumerate(devices(run)):
        size = number(device.get("memory_total_bytes"))
        memory = f", {show_bytes(size).text}" if size else ""
        facts.append((f"Device {index}", FormattedValue(f"{device.get('name', 'unnamed')}{memory}")))
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
    """Return the run's shell command, one flag per line, and those that resumed it with other options; empty if none is recorded."""
    first = run.plan.get("command")
    if not isinstance(first, list):
        return str(first or "")
    later = [words for words in listed(run.plan.get("later_commands")) if isinstance(words, list)]
    return "\n".join(_command_lines(words) for words in [first, *filter(_changes_options, later)])


def _command_lines(words: Sequence[Any]) -> str:
    quoted = [shlex.quote(str(word)) for word in words if word != "--json"]
    return "".join(f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in quoted).strip()


def _changes_options(words: Sequence[Any]) -> bool:
    """Return True if a command passes an option besides --resume."""
    flags = {str(word).partition("=")[0] for word in words if str(word).startswith("--")}
    return bool(flags - {"--resume", "--json"})


def plan_against_measured(run: RunFiles) -> list[Row]:
    """Return each planned figure with the measured one."""
    plan, summary = run.plan, run.summary
    estimate = mapping(plan.get("estimate"))
    steps = number(summary.get("steps"))
    memory = number(plan.get("estimated_bytes")) or number(estimate.get("bytes"))
    if steps is None and not is_running(run.folder):
        steps = float(run.last_step)
    speed, time = (
        (number(estimate.get(key)), number(summary.get(key))) for key in ("tokens_per_s", "seconds")
    )
    figures = [
        ("Peak memory", memory, number(summary.get("peak_memory_bytes")), show_bytes),
        ("Steps", number(plan.get("num_steps")), steps, show_count),
        ("Speed", *speed, show_rate),
        ("Time", *time, show_seconds),
    ]
    return [
        {
            "label": label,
            "planned": show(planned),
            "measured": FormattedValue("not yet") if measured is None else show(measured),
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
    rows, said = list[Row](), set[str]()
    for row in (row for event in run.events for row in _event_rows(event, start)):
        if row["kind"] != Warned.kind or row["text"] not in said:  # a resumed run warns about its data again
            rows.append(row)
            said.add(row["text"] if row["kind"] == Warned.kind else "")
    return rows


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


def _event_time(seconds: float | None, start: datetime | None) -> FormattedValue:
    if seconds is None or not 0 <= seconds < 1e11:
        return FormattedValue("–")
    moment = datetime.fromtimestamp(seconds, tz=start.tzinfo if start else timezone.utc)
    if start is None or moment < start:
        return show_time(moment)
    return FormattedValue(f"+{show_seconds((moment - start).total_seconds()).text}", moment.isoformat())


def _event_text(event: Mapping[str, Any]) -> str:
    """Return the event's message; without one, its values."""
    for name in ("message", "error", "reason"):
        if event.get(name) and not is_adjustment(event):
            return str(event[name])
    if event.get("kind") == Profiled.kind:
        return f"see {event.get('path', 'its files')}"
    samples = listed(event.get("samples"))
    known = {name: value for name, value in event.items() if name not in ("time", "kind", "samples")}
    words = [
        f"{label_of(path.removeprefix('metrics.').replace('.', ' '))} {show_named(path, value).text}"
        for path, value in flat(known)
        if is_flat(value)
    ]
    return " · ".join(words + [f"{len(samples)} samples"] * bool(samples))
