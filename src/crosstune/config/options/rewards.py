"""Options of rewards: which functions, checks, judges and servers score an answer, their weights and their limits."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from crosstune.config.conditions import RL, Condition, Values
from crosstune.config.option import OnResume, StringKind, check_duration, option
from crosstune.core.names import did_you_mean

FUNCTION = "function"
FORMS: Mapping[str, str] = {
    "exact": "exact:COLUMN",
    "number": "number:COLUMN",
    "contains": "contains:COLUMN",
    "code": "code:COLUMN",
    "regex": "regex:PATTERN",
    "json": "json or json:SCHEMA_FILE",
    "length": "length:MIN-MAX, as in length:50-200 (words) or length:200-900chars",
    "tags": "tags:NAME,NAME, as in tags:think,answer",
    "judge": "judge:RUN",
    "server": "server:URL, as in server:http://127.0.0.1:8000/v1",
}
"""Kind of reward -> the way to write it."""
OF_COLUMNS = ("exact", "number", "contains", "code")
"""The kinds whose argument is a column of the data."""
_FUNCTION = re.compile(r"(?P<file>.*\.py):(?P<name>[A-Za-z_]\w*)", re.S)
_STARTS = re.compile(
    rf",\s*(?=(?:{'|'.join(kind for kind in FORMS if kind != 'json')}):|json(?:$|[:,*\s])|(?:[A-Za-z]:)?[^,:]+\.py:[A-Za-z_])"
)
"""The commas between two rewards: a pattern or a list of tags has commas of its own."""
_WEIGHT = re.compile(r"(?P<rest>.*?)\s*\*\s*(?P<weight>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.S | re.I)
_WEIGHT_OF_PATTERN = re.compile(_WEIGHT.pattern.replace(r"\s*\*", r"\s+\*", 1), re.S | re.I)
_LENGTH = re.compile(r"(?P<low>\d{1,9})-(?P<high>\d{1,9})(?P<unit>chars)?")


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A reward as requested."""

    text: str
    """As the user wrote it, without its weight."""
    kind: str
    argument: str
    """The column, pattern, file, run or address; the file of a function."""
    function: str = ""
    weight: float = 1.0


def parse_rewards(text: str, weights: str | None = None) -> list[RewardSpec]:
    """Return the rewards of --reward with their weights. Raise a ValueError with the accepted values."""
    specs = [_parse_reward(part.strip()) for part in _STARTS.split(text)]
    if weights is None:
        return specs
    numbers = _parse_weights(weights)
    if len(numbers) != len(specs):
        raise ValueError(f"one weight for each of the {len(specs)} rewards, separated by commas")
    if any(spec.weight != 1 for spec in specs):
        raise ValueError("weights in --reward or in --reward_weights, not in both")
    return [replace(spec, weight=number) for spec, number in zip(specs, numbers, strict=True)]


def length_range(argument: str) -> tuple[int, int, bool]:
    """Return the shortest and the longest length of `length:MIN-MAX`, and True if it counts characters."""
    match = _LENGTH.fullmatch(argument)
    low, high = (int(match["low"]), int(match["high"])) if match else (1, 0)
    if match is None or low > high or not high:
        raise ValueError(FORMS["length"])
    return low, high, bool(match["unit"])


def tag_names(argument: str) -> list[str]:
    """Return the names of `tags:NAME,NAME`."""
    names = [name.strip() for name in argument.split(",")]
    if not all(re.fullmatch(r"[A-Za-z][\w-]*", name) for name in names) or len({*names}) < len(names):
        raise ValueError(FORMS["tags"])
    return names


def _parse_reward(text: str) -> RewardSpec:
    match = (_WEIGHT_OF_PATTERN if text.startswith("regex:") else _WEIGHT).fullmatch(text)
    rest, weight = (match["rest"], float(match["weight"])) if match else (text, 1.0)
    if not abs(weight) <= 1e6:
        raise ValueError("weights from -1e6 to 1e6")
    kind, colon, argument = rest.partition(":")
    if kind in FORMS:
        _check_argument(kind, argument, has_colon=bool(colon))
        return RewardSpec(text=rest, kind=kind, argument=argument, weight=weight)
    if function := _FUNCTION.fullmatch(rest):
        file, name = function["file"], function["name"]
        return RewardSpec(text=rest, kind=FUNCTION, argument=file, function=name, weight=weight)
    hint = did_you_mean(kind, FORMS)
    raise ValueError(f"{hint}FILE.py:FUNCTION, {', '.join(FORMS.values())}, separated by commas")


def _check_argument(kind: str, argument: str, *, has_colon: bool) -> None:
    if not argument.strip() and (kind != "json" or has_colon):
        raise ValueError(FORMS[kind])
    if kind == "length":
        length_range(argument)
    if kind == "tags":
        tag_names(argument)
    if kind == "regex":
        try:
            re.compile(argument)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a regular expression of Python; this one is not: {error}") from None


def _parse_weights(text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [math.nan]
    if not all(abs(number) <= 1e6 for number in numbers):
        raise ValueError("numbers from -1e6 to 1e6, separated by commas, in the order of --reward")
    return numbers


def _check_rewards(value: str) -> str | None:
    try:
        parse_rewards(value)
    except ValueError as error:
        return str(error)
    return None


def _check_weights(value: str) -> str | None:
    try:
        _parse_weights(value)
    except ValueError as error:
        return str(error)
    return None


def _uses(now: Values, *kinds: str) -> bool:
    return any(spec.kind in kinds for spec in parse_rewards(now["reward"] or "json"))


_REWARDED = Condition("`--reward`", lambda now: bool(now["reward"]))
_SERVER = Condition("`--reward server:URL`", lambda now: _uses(now, "server"))
_CHILDREN = Condition(
    "functions, patterns, JSON or code in `--reward`",
    lambda now: bool(now["reward"]) and _uses(now, FUNCTION, "regex", "json", "code"),
)
_option = partial(option, needs=(RL,))


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    reward: str | None = _option(
        None,
        "Rewards of an answer, separated by commas, each with a weight as in exact:answer*0.5 (default 1): FILE.py:FUNCTION, "
        "exact:COLUMN, number:COLUMN, contains:COLUMN, code:COLUMN, regex:PATTERN, json, json:SCHEMA_FILE, length:MIN-MAX, "
        "tags:NAME,NAME, judge:RUN, server:URL",
        check=_check_rewards,
        joins_items="*",
    )
    reward_weights: str | None = option(
        None,
        "Weights of the rewards in the order of --reward, as in 1,0.5; 0 only reports a reward",
        check=_check_weights,
        joins_items="",
        needs=(RL, _REWARDED),
    )
    rubric: str | None = option(
        None,
        "Text file that tells the server of --reward server:URL how to score",
        holds=StringKind.PATH,
        needs=(RL, _SERVER),
    )
    watch_judge: str | None = _option(
        None,
        "Run of a judge or reward model that scores the answers without any effect on the training, to notice rewards that "
        "rise while answers get worse",
        holds=StringKind.PATH,
        on_resume=OnResume.FREE,
    )
    reward_timeout: str = option(
        "20s",
        "Time limit for a call of a reward function, and for the code of one answer",
        check=check_duration,
        needs=(RL, _CHILDREN),
        on_resume=OnResume.FREE,
    )
    reward_memory: float = option(
        4.0,
        "Memory limit of the process of a reward function or of an answer's code, in GiB of address space (Linux, macOS)",
        low=0.1,
        high=4096,
        needs=(RL, _CHILDREN),
        on_resume=OnResume.FREE,
    )
    reward_patience: str = option(
        "10m",
        "How long to wait for a reward server that does not answer before the run saves a checkpoint and ends",
        check=check_duration,
        needs=(RL, _SERVER),
        on_resume=OnResume.FREE,
    )
    allow_remote_rewards: bool = option(
        False,
        "Allow a reward server on another machine: prompts and answers are sent to it",
        needs=(RL, _SERVER),
        on_resume=OnResume.FREE,
    )
