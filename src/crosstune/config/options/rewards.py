"""Options of rewards: which functions, checks, judges and servers score an answer, their weights and their limits."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial

from crosstune.config.conditions import RL, Condition, Values
from crosstune.config.option import OnResume, StringKind, check_duration, option

FUNCTION = "function"
OF_COLUMNS = ("exact", "number", "contains", "code")
"""The kinds whose argument is a column of the data."""
_NAME = r"[A-Za-z][\w-]*"
_ARGUMENTS = {
    **dict.fromkeys((*OF_COLUMNS, "regex", "judge", "server"), r".*\S.*"),
    "json": ".*",
    "length": r"\d{1,9}-\d{1,9}(?:chars)?",
    "tags": rf"{_NAME}(?:,\s*{_NAME})*",
}
"""Kind of reward -> a pattern of its argument."""
_ACCEPTED = (
    "FILE.py:FUNCTION, exact:COLUMN, number:COLUMN, contains:COLUMN, code:COLUMN, regex:PATTERN, json, json:SCHEMA_FILE, "
    "length:MIN-MAX (words; or as in 200-900chars), tags:NAME,NAME, judge:RUN, server:URL"
)
_FUNCTION = re.compile(r"(?P<file>.*\.py):(?P<name>[A-Za-z_]\w*)", re.S)
_STARTS = re.compile(
    rf",\s*(?=(?:{'|'.join({*_ARGUMENTS} - {'json'})}):|json(?:$|[:,*\s])|(?:[A-Za-z]:)?[^,:]+\.py:[A-Za-z_])"
)
"""A comma between two rewards. Patterns and lists of tags contain commas of their own."""
_NUMBER = r"[-+]?(?:\d{1,6}(?:\.\d{0,9})?|\.\d{1,9})"
_WEIGHT = re.compile(rf"(?P<rest>.*?)\s*\*\s*(?P<weight>{_NUMBER})", re.S)
_WEIGHT_OF_PATTERN = re.compile(rf"(?P<rest>.*?)\s+\*\s*(?P<weight>{_NUMBER})", re.S)


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """A reward as requested."""

    text: str
    """The reward as the user wrote it, without its weight."""
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
    numbers = weights.split(",")
    if len(numbers) != len(specs) or any(spec.weight != 1 for spec in specs):
        raise ValueError(f"{len(specs)} numbers for {text}, and no weights in --reward itself")
    return [replace(spec, weight=float(number)) for spec, number in zip(specs, numbers, strict=True)]


def _parse_reward(text: str) -> RewardSpec:
    match = (_WEIGHT_OF_PATTERN if text.startswith("regex:") else _WEIGHT).fullmatch(text)
    rest, weight = (match["rest"], float(match["weight"])) if match else (text, 1.0)
    if function := _FUNCTION.fullmatch(rest):
        file, name = function["file"], function["name"]
        return RewardSpec(text=rest, kind=FUNCTION, argument=file, function=name, weight=weight)
    kind, colon, argument = rest.partition(":")
    pattern = _ARGUMENTS.get(kind)
    if pattern is None or bool(argument.strip()) < bool(colon) or not re.fullmatch(pattern, argument, re.S):
        raise ValueError(f"rewards separated by commas, each one of {_ACCEPTED}")
    if kind == "length" and int(argument.partition("-")[0]) > int(
        argument.partition("-")[2].removesuffix("chars")
    ):
        raise ValueError("length:MIN-MAX with MIN at most MAX")
    if kind == "regex":
        try:
            re.compile(argument)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"a regular expression of Python; this one is not: {error}") from None
    return RewardSpec(text=rest, kind=kind, argument=argument, weight=weight)


def _check_rewards(value: str) -> str | None:
    try:
        parse_rewards(value)
    except ValueError as error:
        return str(error)
    return None


def _check_weights(value: str) -> str | None:
    is_list = re.fullmatch(rf"\s*{_NUMBER}\s*(?:,\s*{_NUMBER}\s*)*", value) is not None
    return None if is_list else "numbers separated by commas, in the order of --reward"


def _with_kinds(summary: str, *kinds: str) -> Condition:
    def holds(now: Values) -> bool:
        return bool(now["reward"]) and any(spec.kind in kinds for spec in parse_rewards(now["reward"]))

    return Condition(summary, holds)


_REWARDED = Condition("`--reward`", lambda now: bool(now["reward"]))
_SERVER = _with_kinds("`--reward server:URL`", "server")
_CHILDREN = _with_kinds("functions, patterns, JSON or code in `--reward`", FUNCTION, "regex", "json", "code")
_option = partial(option, needs=(RL,))
_for_children = partial(option, needs=(RL, _CHILDREN), on_resume=OnResume.FREE)


@dataclass(frozen=True, kw_only=True)
class RewardOptions:
    reward: str | None = _option(
        None,
        f"Rewards of an answer, separated by commas, each with a weight as in exact:answer*0.5 (default 1): {_ACCEPTED}",
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
    reward_timeout: str = _for_children(
        "20s",
        "Time limit for a call of a reward function, and for the code of one answer",
        check=check_duration,
    )
    reward_memory: float = _for_children(
        4.0,
        "Memory limit of the process of a reward function or of an answer's code, in GiB of address space (Linux, macOS)",
        low=0.1,
        high=4096,
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
