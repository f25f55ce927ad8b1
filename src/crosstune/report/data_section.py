"""Draw the lengths of a data set's examples, and show one example with its supervised text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from crosstune.report.axis import Axis, value_axis
from crosstune.report.differences import Piece
from crosstune.report.files import mapping, number
from crosstune.report.quantity import show_count

MOST_BINS = 200
SHOWN_APART = frozenset({"lengths", "example", "identity"})
"""Fields of a recipe's description that are shown in their own way; the identity is folded away with the other hashes."""


@dataclass(frozen=True, kw_only=True)
class MaskedExample:
    row: int
    num_tokens: int
    pieces: list[Piece]
    """The text, with what carries loss marked."""


def masked_example(data: Mapping[str, Any]) -> MaskedExample | None:
    found = mapping(data.get("example"))
    rows = found.get("pieces")
    pieces = [
        Piece(str(piece.get("text", "")), piece.get("supervised") is True)
        for piece in map(mapping, rows if isinstance(rows, list) else ())
    ]
    if not any(piece.text for piece in pieces):
        return None
    counts = [int(number(found.get(name)) or 0) for name in ("row", "tokens")]
    return MaskedExample(row=counts[0], num_tokens=counts[1], pieces=pieces)


def length_chart(data: Mapping[str, Any]) -> Markup:
    """Return a histogram of the examples' lengths in tokens; empty if they are not recorded."""
    found = mapping(data.get("lengths"))
    first, width = number(found.get("first")), number(found.get("width"))
    recorded = found.get("counts")
    counts = [number(count) for count in recorded] if isinstance(recorded, list) else []
    known = [count for count in counts if count is not None and count >= 0]
    if first is None or not width or width < 0 or not known or len(known) != len(counts):
        return Markup()
    known = known[:MOST_BINS]
    context = number(data.get("context_length"))
    return _draw(first, width, known, context=context)


def _draw(first: float, width: float, counts: Sequence[float], *, context: float | None) -> Markup:
    down = value_axis([0.0, max(counts)], from_zero=True, num_ticks=4)
    across = Axis(low=first, high=first + width * len(counts), ticks=())
    parts = [_count_line(down, tick, label) for tick, label in zip(down.ticks, down.labels(), strict=True)]
    every = max(1, -(-len(counts) // 6))
    for place in range(0, len(counts) + 1, every):
        parts.append(
            Markup('<text class="across" x="{}" y="100%" dy="18">{}</text>').format(
                _percent(place / len(counts)), f"{first + width * place:,.0f}"
            )
        )
    bars = [
        Markup('<rect x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>').format(
            _percent(place / len(counts) + 0.1 / len(counts)),
            _percent(1 - down.fraction(count)),
            _percent(0.8 / len(counts)),
            _percent(down.fraction(count)),
            f"{first + width * place:,.0f} to {first + width * (place + 1) - 1:,.0f} tokens: {count:,.0f} examples",
        )
        for place, count in enumerate(counts)
        if count
    ]
    return Markup(
        '<svg class="plot" role="img" aria-label="{}"><g class="grid" aria-hidden="true">{}</g><g class="bars">{}</g>{}</svg>'
    ).format(
        _describe(first, width, counts),
        Markup("").join(parts),
        Markup("").join(bars),
        _limit_line(across, context),
    )


def _count_line(down: Axis, tick: float, label: str) -> Markup:
    return Markup(
        '<line x1="0" x2="100%" y1="{0}" y2="{0}"/><text class="down" x="0" dx="-8" y="{0}" dy="4">{1}</text>'
    ).format(_percent(1 - down.fraction(tick)), label)


def _limit_line(across: Axis, context: float | None) -> Markup:
    """Mark the context length where it lies within the lengths: examples beyond it were cut, dropped or split."""
    if context is None or not across.low < context <= across.high:
        return Markup()
    return Markup(
        '<g class="marks" aria-hidden="true"><line x1="{0}" x2="{0}" y1="0" y2="100%"/>'
        '<text x="{0}" dx="-6" y="0" dy="12" text-anchor="end">context {1}</text></g>'
    ).format(_percent(across.fraction(context)), f"{context:,.0f}")


def _describe(first: float, width: float, counts: Sequence[float]) -> str:
    most = max(range(len(counts)), key=counts.__getitem__)
    total = show_count(sum(counts)).text
    return (
        f"Lengths of {total} examples, from {first:,.0f} to {first + width * len(counts):,.0f} tokens; "
        f"most have {first + width * most:,.0f} to {first + width * (most + 1) - 1:,.0f}."
    )


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}%"
