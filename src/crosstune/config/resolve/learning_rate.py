"""Provide the default learning rate for a method and an optimizer, and warn about a rate far outside the usual range."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import ADAPTER_METHODS


@dataclass(frozen=True)
class Range:
    """Learning rates beyond which fine-tuning fails in practice, with a typical value."""

    lowest: float
    highest: float
    typical: float


_ADAM = (Range(1e-7, 5e-3, 2e-4), Range(1e-7, 1e-3, 2e-5))
_RANGES: dict[str, tuple[Range, Range]] = {
    # Every weight moves by the whole rate in each step of Lion.
    "lion": (Range(1e-8, 1e-3, 5e-5), Range(1e-8, 2e-4, 3e-6)),
    # Steps in proportion to the clipped gradient.
    "sgd": (Range(1e-3, 10, 0.3), Range(1e-4, 10, 0.03)),
    "adadelta": (Range(1e-2, 100, 1.0), Range(1e-2, 100, 1.0)),
}
"""Optimizer -> range for adapters, and for all other methods; adafactor is scaled like adamw."""


def default_rate(*, optimizer: str) -> float:
    """Return the default learning rate of full fine-tuning; the default of --lr is for adapters."""
    return _range(optimizer, "full").typical


def rate_warning(lr: float, *, optimizer: str, method: str) -> str | None:
    """Return the warning for a learning rate, or None."""
    found = _range(optimizer, method)
    for_what = f"for {method} with {optimizer}; {found.typical:g} is typical"
    if lr > found.highest:
        return f"{lr:g} is very high {for_what}. Above {found.highest:g} the loss rarely falls and may become NaN"
    if 0 < lr < found.lowest:
        return f"{lr:g} is very low {for_what}. Below {found.lowest:g} the weights hardly change"
    return None


def _range(optimizer: str, method: str) -> Range:
    of_adapters, of_weights = _RANGES.get(optimizer.removesuffix("_8bit"), _ADAM)
    return of_adapters if method in ADAPTER_METHODS else of_weights
