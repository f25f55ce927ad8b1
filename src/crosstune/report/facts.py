"""Build the tables about a run: requested and used options, data, machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.report.files import RunFiles, is_adjustment, mapping, number
from crosstune.report.outcome import devices, duration
from crosstune.report.quantity import (
    Shown,
    is_flat,
    label_of,
    read_time,
    show_bytes,
    show_named,
    show_option,
    show_time,
)

Fact = tuple[str, Shown]


@dataclass(frozen=True, kw_only=True)
class OptionRow:
    name: str
    asked: Shown
    used: Shown
    differs: bool


@dataclass(frozen=True, kw_only=True)
class AdjustmentRow:
    option: str
    asked: Shown
    used: Shown
    reason: str
    kind: str


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Mappings with similar keys as the columns of one table."""

    columns: list[str]
    rows: list[tuple[str, list[Shown]]]


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
    """Describe the checkpoint that the last process of the run resumed from."""
    if not isinstance(start, Mapping) or "step" not in start:
        return None
    return f"from step {start['step']}, trained on {start.get('backend', '?')}"


def option_rows(run: RunFiles) -> list[OptionRow]:
    """Return the requested options with the values that the run used."""
    used = mapping(run.plan.get("options"))
    return [
        OptionRow(
            name=name,
            asked=show_option(asked),
            used=show_option(used[name]) if name in used else Shown("not recorded"),
            differs=name in used and used[name] != asked,
        )
        for name, asked in run.asked.items()
    ]


def unasked_options(run: RunFiles) -> list[Fact]:
    options = mapping(run.plan.get("options"))
    return [(name, show_option(value)) for name, value in options.items() if name not in run.asked]


def adjustment_rows(run: RunFiles) -> list[AdjustmentRow]:
    """Return the adjustments of the plan and of the run, without duplicates."""
    planned = run.plan.get("adjustments")
    recorded = [*(planned if isinstance(planned, list) else []), *filter(is_adjustment, run.events)]
    rows: dict[tuple[Shown | str, ...], AdjustmentRow] = {}
    for item in map(mapping, recorded):
        row = AdjustmentRow(
            option=str(item.get("option", "")),
            asked=show_option(item.get("asked")),
            used=show_option(item.get("used")),
            reason=str(item.get("reason", "")),
            # In an event, `kind` is the kind of event, and `sort` the kind of adjustment.
            kind=str(item.get("sort") or item.get("kind", "change")),
        )
        rows.setdefault((row.option, row.asked, row.used, row.reason), row)
    return list(rows.values())


def data_tables(data: Mapping[str, Any]) -> tuple[list[Fact], Grid | None, list[tuple[str, str]]]:
    """Split a recipe's description of its data into plain values, one table of its parts, and the rest as text."""
    facts = [(label_of(name), show_named(name, value)) for name, value in data.items() if is_flat(value)]
    parts = {name: value for name, value in data.items() if _is_part(value)}
    rest = [
        (label_of(name), json.dumps(value, ensure_ascii=False, indent=2, default=str))
        for name, value in data.items()
        if not is_flat(value) and name not in parts
    ]
    return facts, _grid(parts) if parts else None, rest


def _is_part(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(is_flat(item) for item in value.values())


def _grid(parts: Mapping[str, Mapping[str, Any]]) -> Grid:
    names = dict.fromkeys(name for part in parts.values() for name in part)
    rows = [
        (
            label_of(name),
            [show_named(name, part[name]) if name in part else Shown("–") for part in parts.values()],
        )
        for name in names
    ]
    return Grid(columns=[label_of(name) for name in parts], rows=rows)


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
