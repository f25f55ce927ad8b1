"""Collect the profile of a run: where the time of a step goes, and how far it is from the device's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from crosstune.core.events import Profiled
from crosstune.report.axis import step_axis, value_axis
from crosstune.report.files import RunFiles, mapping, number
from crosstune.report.quantity import Shown, byte_unit, show_bytes, show_number, show_seconds, show_share

MOST_OPERATORS = 15
MOST_PATHS = 20


@dataclass(frozen=True, kw_only=True)
class PhaseRow:
    name: str
    time: Shown
    share: Shown
    width: str
    """The share in percent, for the bar."""
    colour: int


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    name: str
    time: Shown
    share: Shown
    calls: Shown


@dataclass(frozen=True, kw_only=True)
class ProfileSection:
    title: str
    bar: Markup
    phases: list[PhaseRow]
    figures: list[tuple[str, Shown]]
    operators: list[OperatorRow]
    memory: Markup
    """The allocated bytes over time; empty if they were not recorded."""
    memory_unit: str
    files: list[str]


def collect_profile(run: RunFiles) -> ProfileSection | None:
    """Return the last recorded profile; None if there is none."""
    events = run.events_of(Profiled)
    result = mapping(events[-1].get("result")) if events else {}
    step_s, phases = number(result.get("step_s")), mapping(result.get("phases"))
    if step_s is None or not phases:
        return None
    steps = result.get("steps")
    count = len(steps) if isinstance(steps, list) else 0
    rows = [_phase(str(name), mapping(phase), place) for place, (name, phase) in enumerate(phases.items())]
    files, operators = result.get("files"), result.get("operators")
    memory, unit = _memory(result.get("memory_timeline"))
    return ProfileSection(
        title=f"{_time(step_s).text} a step, the mean of {count} recorded steps",
        bar=_bar(rows),
        phases=rows,
        figures=_figures(result, step_s),
        operators=[_operator(mapping(each)) for each in (operators if isinstance(operators, list) else [])][
            :MOST_OPERATORS
        ],
        memory=memory,
        memory_unit=unit,
        files=[str(events[-1].get("path", "")), *map(str, files if isinstance(files, list) else ())][
            :MOST_PATHS
        ],
    )


def _phase(name: str, phase: Mapping[str, Any], place: int) -> PhaseRow:
    share = number(phase.get("share")) or 0.0
    return PhaseRow(
        name=name,
        time=_time(number(phase.get("seconds")) or 0.0),
        share=show_share(share),
        width=f"{100 * min(1.0, max(0.0, share)):.2f}%",
        colour=7 if name == "other" else 1 + place % 6,
    )


def _bar(rows: list[PhaseRow]) -> Markup:
    """Draw one bar of all phases."""
    parts, start = list[Markup](), 0.0
    for row in rows:
        width = float(row.width.removesuffix("%"))
        parts.append(
            Markup(
                '<rect class="c{}" x="{}%" y="0" width="{}%" height="100%"><title>{}: {}</title></rect>'
            ).format(row.colour, f"{start:.2f}", f"{width:.2f}", row.name, row.share.text)
        )
        start += width
    described = ", ".join(f"{row.name} {row.share.text}" for row in rows)
    return Markup('<svg class="phases" role="img" aria-label="Time of a step: {}">{}</svg>').format(
        described, Markup("").join(parts)
    )


def _figures(result: Mapping[str, Any], step_s: float) -> list[tuple[str, Shown]]:
    """Return how busy the machine was, beside what it can do."""
    limits, found = mapping(result.get("limits")), list[tuple[str, Shown]]()
    busy, cores = number(result.get("device_busy_share")), number(result.get("cores_busy"))
    flops, share = number(result.get("flops")), number(result.get("limit_share"))
    if busy is not None:
        found.append(("Device busy", show_share(busy)))
    if cores is not None:
        found.append(("CPU", Shown(f"{cores:.1f} of {result.get('num_cores')} cores busy", repr(cores))))
    if flops and step_s > 0:
        found.append(("Matrix products", _rate(flops / step_s, "FLOP/s")))
    if share is not None:
        found.append(("Share of the limit", show_share(share)))
    if (matrix := number(limits.get("flops_per_s"))) is not None:
        rate = _rate(matrix, "FLOP/s")
        found.append(
            ("Measured limit of products", rate._replace(text=f"{rate.text} in {limits.get('dtype')}"))
        )
    if (memory := number(limits.get("bytes_per_s"))) is not None:
        found.append(("Measured limit of memory", _rate(memory, "B/s")))
    return found


def _time(seconds: float) -> Shown:
    """Format the time of a part of a step: all of them in milliseconds unless a step is long."""
    if seconds >= 1:
        return show_seconds(seconds)
    return Shown(f"{show_number(1000 * seconds).text} ms", f"{seconds!r} seconds")


def _rate(value: float, unit: str) -> Shown:
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    factor, prefix = next((pair for pair in prefixes if value >= pair[0]), (1.0, ""))
    return Shown(f"{show_number(value / factor).text} {prefix}{unit}", repr(value))


def _operator(each: Mapping[str, Any]) -> OperatorRow:
    shapes = str(each.get("shapes") or "")
    return OperatorRow(
        name=f"{each.get('name', '')} {shapes}".strip(),
        time=_time(number(each.get("seconds")) or 0.0),
        share=show_share(number(each.get("share")) or 0.0),
        calls=show_number(number(each.get("calls")) or 0.0),
    )


def _memory(timeline: Any) -> tuple[Markup, str]:
    """Draw the allocated bytes over the recorded steps; return also the unit of the axis."""
    pairs = (
        [pair for pair in timeline if isinstance(pair, list) and len(pair) == 2]
        if isinstance(timeline, list)
        else []
    )
    known = [
        (at, size)
        for at, size in ((number(a), number(b)) for a, b in pairs)
        if at is not None and size is not None
    ]
    if len(known) < 2:
        return Markup(), ""
    unit, divisor = byte_unit(max(size for _, size in known))
    down = value_axis([size / divisor for _, size in known], from_zero=True, num_ticks=4)
    across = step_axis(0.0, 1000 * max(at for at, _ in known))
    lines = [
        Markup(
            '<line x1="0" x2="100%" y1="{0}" y2="{0}"/><text class="down" x="0" dx="-8" y="{0}" dy="4">{1}</text>'
        ).format(f"{100 * (1 - down.fraction(tick)):.2f}%", label)
        for tick, label in zip(down.ticks, down.labels(), strict=True)
    ]
    lines += [
        Markup('<text class="across" x="{}" y="100%" dy="18">{}</text>').format(
            f"{100 * across.fraction(tick):.2f}%", f"{tick:,.0f}"
        )
        for tick in across.ticks
    ]
    path = "".join(
        f"{'L' if place else 'M'}{1000 * across.fraction(1000 * at):.1f} {1000 * (1 - down.fraction(size / divisor)):.1f}"
        for place, (at, size) in enumerate(known)
    )
    highest = show_bytes(max(size for _, size in known)).text
    drawn = Markup(
        '<svg class="plot" role="img" aria-label="Allocated memory over the recorded steps in {}, at most {}">'
        '<g class="grid" aria-hidden="true">{}<text class="down" x="0" dx="-8" y="100%" dy="18">ms</text></g>'
        '<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" width="100%" height="100%" class="curve line c3"><path d="{}"/></svg></svg>'
    ).format(unit, highest, Markup("").join(lines), path)
    return drawn, unit
