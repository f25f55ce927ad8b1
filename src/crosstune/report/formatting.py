"""Format values for the page: numbers, options, times, and metrics by their name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any, NamedTuple

from crosstune.report.files import mapping, number

MINUS = "\N{MINUS SIGN}"
NOT_FINITE = "not finite"
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FIRST_METRICS = ("loss", "exact_match", "rewards/accuracies", "rewards/margins")
_FEW_METRICS = ("loss", "rewards/margins", "rewards/accuracies", "kl")
"""The metrics of preferences and distillation on the terminal; metrics.jsonl and the page have all."""
_ANSWER_SHARES = {
    "frac_reward_zero_std": "groups with equal rewards",
    "completions/clipped_ratio": "cut answers",
    "completions/unscored_ratio": "answers without a reward",
    "clip_ratio/region_mean": "clipped tokens",
}
"""Fractions of generated answers, groups and tokens -> their labels."""
_LABELS = _ANSWER_SHARES | {"completions/mean_length": "tokens per answer", "entropy": "entropy per token"}
_PART = re.compile(r"rewards/(?P<name>.+)/(?P<kind>mean|failed)")
_DETAIL = re.compile(
    r"(?:reward_|rewards/.+/)std|completions/(?:max|mean_terminated)_length|clip_ratio/(?:low|high)_mean|(?:sampling|time)/.+"
)
"""Metrics of generated answers that only metrics.jsonl has."""
# Words in the names of metrics.
_LOWER_IS_BETTER = frozenset(
    {"loss", "nll", "nats", "perplexity", "ppl", "error", "mse", "mae", "rmse", "wer", "cer", "ece"}
)
_SHARES = frozenset(
    {
        "match",
        "accuracy",
        "accuracies",
        "acc",
        "agreement",
        "precision",
        "recall",
        "f1",
        "auc",
        "share",
        "winrate",
        "within",
        "consistency",
    }
)
_HIGHER_IS_BETTER = _SHARES | frozenset(
    {
        "bleu",
        "chrf",
        "rouge",
        "correlation",
        "spearman",
        "pearson",
        "kendall",
        "qwk",
        "kappa",
        "win",
        "margin",
        "margins",
        "reward",
    }
)
_OUT_OF_100 = frozenset({"bleu", "chrf"})
_SPELLING = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "pearson": "Pearson",
    "spearman": "Spearman",
    "kendall": "Kendall",
}
_SPELLING |= {word: word.upper() for word in ("ece", "kl", "mae", "mse", "qwk", "rmse", "sft")}
_CONTROLS = frozenset({"shuffled", "zero"})
"""Words in the names of control metrics, measured with wrong inputs: no direction is better."""


class FormattedValue(NamedTuple):
    """A formatted value: the text on the page, and the full value for its tooltip."""

    text: str
    full: str = ""


def show_number(value: float, *, digits: int = 3) -> FormattedValue:
    """Format a measured value with a few significant digits."""
    size = abs(value)
    if value == 0:
        text = "0"
    elif size >= 1e9 or size < 1e-4:
        text = short_exponent(f"{value:.{digits - 2}e}")
    else:
        exponent = int(f"{size:e}".partition("e")[2])
        text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    return FormattedValue(signed(text), repr(value))


def show_setting(value: float) -> FormattedValue:
    """Format a chosen value, such as a learning rate, as users type it."""
    text = f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else short_exponent(f"{value:.3e}")
    return FormattedValue(signed(text), repr(value))


def show_count(value: float) -> FormattedValue:
    whole = round(value)
    full = signed(f"{whole:,}")
    for divisor, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if abs(whole) >= divisor:
            return FormattedValue(f"{show_number(whole / divisor, digits=3).text} {unit}", full)
    return FormattedValue(full, full)


def show_examples(data: Mapping[str, Any]) -> str:
    """Format the amount of training data from a run's data report: pairs, labeled answers or examples."""
    examples, pairs = number(mapping(data.get("train")).get("examples")), number(data.get("pairs"))
    if pairs:
        return f"{show_count(pairs).text} pairs" + (
            f" ({show_count(examples).text} answers)" if examples else ""
        )
    return f"{show_count(examples).text} {'answers' if 'answers' in data else 'examples'}" if examples else ""


def ranked(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without the ranking accuracy if nothing can be ranked: the model equals its reference, all rewards are 0."""
    rewards = [number(metrics.get(f"rewards/{side}")) for side in ("chosen", "rejected")]
    equal = all(reward is not None and abs(reward) < 1e-4 for reward in rewards)
    return {name: value for name, value in metrics.items() if not (equal and name == "rewards/accuracies")}


def terminal_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics for the terminal."""
    if "reward" in metrics:
        kept = ("completions/mean_length", "completions/clipped_ratio")
        parts = [name for name in metrics if name.startswith("rewards/") and name.endswith("/mean")]
        names = ("reward", *(parts if len(parts) > 1 else ()), *kept)
        return {name: metrics[name] for name in names if name in metrics}
    if "rewards/chosen" not in metrics:
        return dict(metrics)
    return {name: ranked(metrics)[name] for name in _FEW_METRICS if name in ranked(metrics)}


def page_metrics(found: Mapping[str, Iterable[Any]]) -> list[str]:
    """Return the names of the metrics that pages show, given the values of each. Few of the metrics of generated answers are
    shown: no spreads, no times, no failures if there were none, and no parts of a reward that has only one."""
    parts = [name for name in found if (part := _PART.fullmatch(name)) and part["kind"] == "mean"]

    def is_shown(name: str) -> bool:
        if _DETAIL.fullmatch(name) or (len(parts) == 1 and name in parts and "reward" in found):
            return False
        rare = name.endswith("/failed") or name in _ANSWER_SHARES
        return not rare or any(number(value) for value in found[name])

    return [name for name in found if is_shown(name)]


def byte_unit(size: float) -> tuple[str, int]:
    """Return the largest unit in which the size is at least one, and its number of bytes."""
    power = min(len(_BYTE_UNITS), max(1, -(-int(abs(size)).bit_length() // 10))) - 1
    return _BYTE_UNITS[power], 1024**power


def show_bytes(value: float) -> FormattedValue:
    unit, divisor = byte_unit(value)
    return FormattedValue(f"{show_number(value / divisor, digits=3).text} {unit}", f"{round(value):,} bytes")


def show_seconds(value: float) -> FormattedValue:
    full = f"{value:,.3f} seconds"
    if 0 < value < 1:
        return FormattedValue(f"{show_number(1000 * value).text} ms", f"{value!r} seconds")
    if value < 60:
        return FormattedValue(f"{show_setting(float(f'{value:.3g}')).text} s", full)
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return FormattedValue(f"{minutes} min {seconds:02} s", full)
    return FormattedValue(f"{minutes // 60} h {minutes % 60:02} min", full)


def show_rate(tokens_per_s: float) -> FormattedValue:
    text = show_count(tokens_per_s).text if tokens_per_s >= 100 else show_number(tokens_per_s, digits=3).text
    return FormattedValue(f"{text} tok/s", f"{tokens_per_s!r} tokens per second")


def show_share(share: float) -> FormattedValue:
    """Format a fraction as a percentage."""
    percent = 100 * share
    text = f"{percent:.1f}" if abs(percent) >= 10 or percent == 0 else show_number(percent, digits=2).text
    return FormattedValue(f"{signed(text.removesuffix('.0'))}\N{NO-BREAK SPACE}%", repr(share))


def show_time(moment: datetime) -> FormattedValue:
    return FormattedValue(moment.strftime("%Y-%m-%d %H:%M %Z").strip(), moment.isoformat())


def read_time(value: Any) -> datetime | None:
    """Parse an ISO 8601 timestamp (UTC if it has no offset); return None if it is invalid."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def show_option(value: Any) -> FormattedValue:
    """Format an option's value as the user writes it: no rounding, no thousands separators."""
    if value is None:
        return FormattedValue("not set")
    if isinstance(value, str):
        return FormattedValue(value or "(empty)")
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, int, float)) for item in value):
        is_text = any(str(item).endswith(".") for item in value)
        return FormattedValue((" " if is_text else ", ").join(str(item) for item in value) or "(none)")
    return FormattedValue(json.dumps(value, ensure_ascii=False, default=str))


def show_named(name: str, value: Any) -> FormattedValue:
    """Format a recorded value in the unit that its name implies, such as `_bytes` or `_s`."""
    amount = number(value)
    if amount is None:
        if isinstance(value, bool):
            return FormattedValue("yes" if value else "no")
        return FormattedValue("not recorded") if value is None else show_option(value)
    if name.endswith("_bytes"):
        return show_bytes(amount)
    if name.endswith(("_s", "seconds")):
        return show_seconds(amount)
    return show_count(amount) if isinstance(value, int) else show_number(amount)


def label_of(name: str) -> str:
    """Return an identifier as words: `num_steps` becomes `steps`, `rewards/exact/mean` becomes `reward exact`."""
    if part := _PART.fullmatch(name):
        return f"{'reward' if part['kind'] == 'mean' else 'answers without reward'} {part['name']}"
    if name in _LABELS:
        return _LABELS[name]
    words = name.removeprefix("num_").replace("_", " ").split()
    return " ".join(_SPELLING.get(word, word) for word in words) or name


def is_flat(value: Any) -> bool:
    """Return True for a value that fits into one table cell."""
    items = value if isinstance(value, (list, tuple)) else ()
    return not any(isinstance(item, (Mapping, list, tuple)) for item in items) and not isinstance(
        value, Mapping
    )


def short_exponent(text: str) -> str:
    """Shorten 1.50e-04 to 1.5e-4."""
    mantissa, _, exponent = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def signed(text: str) -> str:
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


@dataclass(frozen=True, kw_only=True)
class MetricDisplay:
    """Label and format of a metric."""

    label: str
    show: Callable[[float], FormattedValue]
    unit: str = ""
    divisor: float = 1.0
    """Axes show values divided by this."""
    from_zero: bool = False
    points: float = 0.0
    """For a metric with a maximum: points per unit; its change is shown in points."""
    better: int = 0
    """1 if higher is better, -1 if lower is better, 0 if unknown."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """The formatted difference between two values."""

    amount: FormattedValue
    verdict: str
    """better, worse, unchanged, or empty if the better direction is unknown."""
    rising: bool


def display_of(name: str, values: Sequence[float]) -> MetricDisplay:
    """Choose the label, format and better direction of a metric by its name."""
    words = set(name.lower().replace("-", "_").replace("/", "_").split("_"))
    better = -1 if words & _LOWER_IS_BETTER else int(bool(words & _HIGHER_IS_BETTER))
    make = partial(MetricDisplay, label=label_of(name), better=0 if words & _CONTROLS else better)
    if name == "lr":
        return make(show=show_setting, from_zero=True)
    if name == "tokens_per_s":
        return make(show=show_rate, unit="tok/s", from_zero=True, better=1)
    if name == "memory_bytes":
        unit, divisor = byte_unit(max(values, default=0.0))
        return make(show=show_bytes, unit=unit, divisor=divisor, from_zero=True, better=-1)
    is_share = words & _SHARES or "failed" in words or name in _ANSWER_SHARES
    if is_share and all(0 <= value <= 1 for value in values):
        return make(show=show_share, unit="%", divisor=0.01, from_zero=True, points=100.0)
    return make(show=show_number, from_zero=name == "grad_norm", points=float(bool(words & _OUT_OF_100)))


def ordered(names: Iterable[str]) -> list[str]:
    """Return the loss and the main metrics first, the others in the given order."""
    names = list(names)
    first = [name for name in _FIRST_METRICS if name in names]
    return first + [name for name in names if name not in first]


def change_between(before: float, after: float, display: MetricDisplay) -> Change:
    delta = after - before
    if delta == 0:
        return Change(amount=FormattedValue("no change"), verdict="unchanged", rising=False)
    if display.points:
        text = f"{show_number(abs(delta) * display.points).text} points"
    elif before > 0:
        text = show_share(abs(delta) / before).text
    else:
        text = show_number(abs(delta)).text
    verdict = {1: "better", -1: "worse", 0: ""}[display.better * (1 if delta > 0 else -1)]
    amount = FormattedValue(f"{'+' if delta > 0 else MINUS}{text}", repr(delta))
    return Change(amount=amount, verdict=verdict, rising=delta > 0)
