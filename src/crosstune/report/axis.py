"""Compute chart axes: range, round tick values and tick labels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from crosstune.report.quantity import MINUS

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)
MOST_LOG_TICKS = 8
LEAST_LOG_RATIO = 3.0
"""A logarithmic axis is offered where the highest value is at least this multiple of the lowest."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def fraction(self, value: float) -> float:
        """Return the position of a value: 0 at the low end, 1 at the high end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self) -> list[str]:
        if self.is_log:
            return [tick_label(tick, gap=tick) for tick in self.ticks]
        gap = min(
            (b - a for a, b in zip(self.ticks, self.ticks[1:], strict=False)), default=self.high - self.low
        )
        return [tick_label(tick, gap=gap) for tick in self.ticks]


def value_axis(values: Sequence[float], *, from_zero: bool, num_ticks: int = 5) -> Axis:
    """Return an axis that covers all values and ends on round numbers."""
    low, high = min(values), max(values)
    # Start at zero when the values vary by more than a factor of two; otherwise zoom in on their range.
    if from_zero or (low > 0 and low < high / 2):
        low, high = min(0.0, low), max(0.0, high)
    if high - low <= max(abs(low), abs(high), 1e-290) * 1e-9:
        margin = abs(high) / 10 or 1.0
        low, high = low - margin * (not from_zero), high + margin
    step = round_step((high - low) / num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(low=first * step, high=last * step, ticks=tuple(i * step for i in range(first, last + 1)))


def log_axis(values: Sequence[float]) -> Axis:
    """Return a logarithmic axis over positive values, with ticks at 1, 2 and 5 times powers of ten."""
    low, high = min(values), max(values)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    round_values = [_scaled(size, power) for power in powers for size in (1.0, 2.0, 5.0)]
    first = max(tick for tick in round_values if tick <= low * (1 + 1e-9))
    last = min(
        (tick for tick in round_values if tick >= high * (1 - 1e-9)), default=_scaled(1.0, powers[-1] + 1)
    )
    ticks = [tick for tick in round_values if first <= tick <= last]
    while len(ticks) > MOST_LOG_TICKS:
        ticks = ticks[::3] if len(ticks) > 3 * MOST_LOG_TICKS else ticks[::2]
    return Axis(low=first, high=last, ticks=tuple(ticks), is_log=True)


def step_axis(low: float, high: float, *, num_ticks: int = 6) -> Axis:
    """Return an axis over exactly the steps that ran, with ticks at whole numbers."""
    if high <= low:
        low, high = low - 1, high + 1
    step = max(1.0, round_step((high - low) / num_ticks))
    if step == 2.5:
        step = 2.0
    first, last = math.ceil(low / step), math.floor(high / step)
    return Axis(low=low, high=high, ticks=tuple(i * step for i in range(first, last + 1)))


def round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `rough`."""
    power = math.floor(math.log10(rough))
    steps = (_scaled(size, power) for size in _ROUND)
    return next(step for step in steps if step >= rough * (1 - 1e-9))


def _scaled(size: float, power: int) -> float:
    # Divide for negative powers: 3 / 10 is the double nearest to 0.3, 3 * 0.1 is not.
    return size * 10.0**power if power >= 0 else size / 10.0**-power


def tick_label(value: float, *, gap: float) -> str:
    """Format a tick with only as many decimals as distinguish it from its neighbours."""
    if abs(value) < gap / 1000:
        return "0"
    # Small steps between large values, as on an axis that zooms in, read better without exponents.
    if gap >= 1e9 or abs(value) >= 1e15 or gap < 1e-6 or (gap < 1e-3 and abs(value) <= 50 * gap):
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(gap)) + 1)
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        text = f"{mantissa}e{int(exponent)}"
    else:
        suffix, divisor = next(((s, d) for s, d in (("M", 1e6), ("k", 1e3)) if gap >= d), ("", 1.0))
        text = f"{value / divisor:,.{_decimals(gap / divisor)}f}{suffix}"
    return text.replace("-", MINUS, 1) if value < 0 else text


def _decimals(gap: float) -> int:
    return next((places for places in range(6) if math.isclose(round(gap, places), gap, rel_tol=1e-6)), 6)
