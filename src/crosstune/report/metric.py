"""Choose label, format and direction of improvement of an evaluation metric by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from crosstune.report.quantity import MINUS, Shown, label_of, show_number, show_share

_FIRST = ("loss", "exact_match")
_LOWER_IS_BETTER = frozenset(
    {"loss", "nll", "nats", "perplexity", "ppl", "error", "mse", "mae", "rmse", "wer", "cer", "ece"}
)
_SHARES = frozenset(
    {"match", "accuracy", "acc", "agreement", "precision", "recall", "f1", "auc", "share", "winrate"}
)
_HIGHER_IS_BETTER = _SHARES | {
    "bleu",
    "chrf",
    "rouge",
    "correlation",
    "spearman",
    "pearson",
    "kendall",
    "win",
}
_OUT_OF_100 = frozenset({"bleu", "chrf"})
_SPELLING = {"bleu": "BLEU", "chrf": "chrF"}
_CONTROLS = frozenset({"shuffled", "zero"})
"""Words of metrics that are measured with wrong inputs, for comparison: no direction is better."""


@dataclass(frozen=True, kw_only=True)
class MetricDisplay:
    label: str
    show: Callable[[float], Shown]
    is_share: bool
    points: float
    """How many points the value 1 is, for a metric with a highest value: its change is shown in points. 0 for others."""
    better: int
    """1 when higher is better, -1 when lower is better, 0 when the name does not say."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The formatted difference between two values."""

    amount: Shown
    verdict: str
    """better, worse, unchanged, or empty when the metric's name does not say which direction is better."""
    rising: bool


def display_of(name: str, values: Sequence[float]) -> MetricDisplay:
    words = set(name.lower().replace("-", "_").replace("/", "_").split("_"))
    is_share = bool(words & _SHARES) and all(0 <= value <= 1 for value in values)
    better = -1 if words & _LOWER_IS_BETTER else int(bool(words & _HIGHER_IS_BETTER))
    if words & _CONTROLS:
        better = 0
    return MetricDisplay(
        label=" ".join(_SPELLING.get(word, word) for word in label_of(name).split()),
        show=show_share if is_share else show_number,
        is_share=is_share,
        points=100.0 if is_share else float(bool(words & _OUT_OF_100)),
        better=better,
    )


def ordered(names: Iterable[str]) -> list[str]:
    """Return loss and exact match first, the others in their given order."""
    names = list(names)
    return [name for name in _FIRST if name in names] + [name for name in names if name not in _FIRST]


def change_between(before: float, after: float, display: MetricDisplay) -> Change:
    delta = after - before
    if delta == 0:
        return Change(amount=Shown("no change"), verdict="unchanged", rising=False)
    if display.points:
        text = f"{_sign(delta)}{show_number(abs(delta) * display.points, digits=3).text} points"
    elif before > 0:
        text = f"{_sign(delta)}{show_share(abs(delta) / before).text}"
    else:
        text = f"{_sign(delta)}{show_number(abs(delta)).text}"
    verdict = {1: "better", -1: "worse", 0: ""}[display.better * (1 if delta > 0 else -1)]
    return Change(amount=Shown(text, repr(delta)), verdict=verdict, rising=delta > 0)


def _sign(delta: float) -> str:
    return "+" if delta > 0 else MINUS
