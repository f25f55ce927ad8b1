"""Check and open the rewards of a configuration, and score answers with all of them."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.load import reward_key
from crosstune.config.option import parse_duration
from crosstune.config.options.rewards import FUNCTION, OF_COLUMNS, RewardSpec, parse_rewards
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, RewardPrinted, Warned
from crosstune.core.rewards import ScoredAnswer
from crosstune.files.plain_files import read_plain_text
from crosstune.recipes.rl.rewards.answer_checks import CheckReward, Reward
from crosstune.recipes.rl.rewards.functions import (
    CodeReward,
    FunctionReward,
    Limits,
    PatternReward,
    check_file,
    read_schema,
)
from crosstune.recipes.rl.rewards.judged import FindJudge, JudgeReward, ServerReward, connect_server
from crosstune.recipes.rl.verdicts import WATCHED

_RUBRIC_LIMIT, _FILE_LIMIT = 1 << 20, 16 << 20
_BY_ARGUMENT = (*OF_COLUMNS, "regex", "length", "tags")
"""The kinds whose argument determines the score, and is no file or address."""
_ENOUGH_FAILURES = 32
"""Failures without any score that stop a run."""
_FIRST_WARNINGS = 3
"""Failures that are warned about one by one; after them, those with the numbers 10, 100, ..."""


def reward_specs(config: Config) -> list[RewardSpec]:
    """Return the rewards of --reward, and the judge of --watch_judge with weight 0."""
    try:
        specs = parse_rewards(config.reward, config.reward_weights) if config.reward else []
    except ValueError as error:
        raise UserError("--reward_weights does not match --reward.", do=f"expected {error}") from error
    if not specs:
        raise UserError("There is no reward.", do="pass --reward, as in --reward exact:answer")
    if not any(spec.weight for spec in specs):
        raise UserError(
            "No reward has a weight, so there is nothing to learn.",
            why=f"the rewards are {', '.join(spec.text for spec in specs)}.",
            do="specify what a good answer is with --reward",
        )
    if config.watch_judge is not None:
        text = f"judge:{config.watch_judge}"
        specs.append(RewardSpec(text=text, kind="judge", argument=config.watch_judge, weight=0.0))
    return specs


def check_columns(config: Config, known: Collection[str]) -> None:
    """Raise if a reward compares answers with a column that no row has."""
    missing = [
        spec.argument
        for spec in reward_specs(config)
        if spec.kind in OF_COLUMNS and spec.argument not in known
    ]
    if missing:
        raise UserError(
            f"A reward compares answers with the column {missing[0]}, which no row has.",
            why=f"the rows have {', '.join(sorted(known)) or 'no column next to the prompt'}.",
            do="correct the column in --reward, or add it to the data",
        )


def check_files(config: Config) -> None:
    """Raise if a file of a reward is missing or cannot be read. The user's code is not run."""
    for spec in reward_specs(config):
        if spec.kind == FUNCTION:
            _check_function(spec)
        elif spec.kind == "json" and spec.argument:
            read_schema(spec.argument)
        elif spec.kind == "server":
            read_rubric(config.rubric)


def read_rubric(file: str | None) -> str:
    if file is None:
        raise UserError(
            "--reward server:URL needs a rubric.",
            why="the server's model must know how to score.",
            do="write it into a text file, and pass it with --rubric FILE",
        )
    text = read_plain_text(Path(file).expanduser(), limit=_RUBRIC_LIMIT).strip()
    if not text:
        raise UserError(f"The rubric {file} is empty.", do="describe in it what makes an answer good")
    return text


def _check_function(spec: RewardSpec) -> None:
    file = Path(spec.argument).expanduser()
    check_file(file, spec.text)
    try:
        names = set(_defined_names(ast.parse(read_plain_text(file, limit=_FILE_LIMIT))))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(
            f"--reward {spec.text} cannot be used.", why=f"{file} is not Python: {error}."
        ) from None
    if spec.function not in names and "*" not in names:
        raise UserError(
            f"--reward {spec.text} cannot be used.",
            why=f"{file} has no function {spec.function}.",
            do=f"define it there as `def {spec.function}(prompts, completions, **kwargs)`",
        )


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file defines, imports or assigns anywhere; `*` if it imports all of another."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


@dataclass(kw_only=True)
class NamedReward:
    name: str
    spec: RewardSpec
    reward: Reward
    observer: Observer
    num_failed: int = 0
    num_scored: int = 0
    _num_problems: int = field(default=0, init=False)

    def score(self, answers: Sequence[ScoredAnswer]) -> list[float]:
        """Return the scores, nan for a failure. Failures are counted and reported; raise if all scores fail."""
        found = self.reward.score(answers)
        if self.spec.kind in OF_COLUMNS:
            column = self.spec.argument
            found = [
                f"the row has no column {column}" if score is None and column not in one.columns else score
                for score, one in zip(found, answers, strict=True)
            ]
        problems = [one for one in found if isinstance(one, str)]
        self.num_scored += len(found)
        self.num_failed += len(problems)
        if self.spec.weight and self.num_failed == self.num_scored >= _ENOUGH_FAILURES:
            raise UserError(
                f"The reward {self.name} failed for all {self.num_failed} answers so far.",
                why=f"{problems[0]}.",
                do="correct it, or remove it from --reward: nothing can be learned from it",
            )
        if problems:
            self._warn(problems[0], len(problems), len(found))
        return [np.nan if one is None or isinstance(one, str) else float(one) for one in found]

    def _warn(self, reason: str, num_failed: int, num_answers: int) -> None:
        self._num_problems += 1
        count = self._num_problems
        if count > _FIRST_WARNINGS and count != 10 ** (len(str(count)) - 1):
            return
        so_far = f" ({self.num_failed:,} of {self.num_scored:,} so far)" if count > 1 else ""
        message = (
            f"the reward {self.name} has no score for {num_failed} of {num_answers} answers{so_far}: {reason}"
        )
        self.observer.on_event(Warned(message=message))


class OpenedRewards:
    """The rewards of a run, as in `core.rewards.Rewards`."""

    def __init__(self, members: Sequence[NamedReward]) -> None:
        self._members = members

    @property
    def names(self) -> Sequence[str]:
        return [one.name for one in self._members]

    @property
    def weights(self) -> Sequence[float]:
        return [one.spec.weight for one in self._members]

    def score(self, answers: Sequence[ScoredAnswer]) -> NDArray[np.float64]:
        if not answers:
            return np.zeros((0, len(self._members)))
        return np.array([one.score(answers) for one in self._members], dtype=np.float64).T

    def identity(self) -> str:
        parts = [
            # The name of a file, a run or an address may differ on another machine.
            [
                one.spec.kind,
                one.spec.argument if one.spec.kind in _BY_ARGUMENT else "",
                one.reward.identity(),
                one.spec.weight,
            ]
            for one in self._members
            if one.spec.weight  # the others only observe
        ]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        for one in self._members:
            one.reward.close()


def open_rewards(config: Config, *, backend: str, observer: Observer, open_judge: FindJudge) -> OpenedRewards:
    """Open the rewards of --reward and the judge of --watch_judge. Functions are imported here; judges are found here, and
    loaded on `backend` when they score for the first time."""
    specs = reward_specs(config)
    names = _names(specs, watched=config.watch_judge is not None)
    members: list[NamedReward] = []
    try:
        for spec, name in zip(specs, names, strict=True):
            reward = _open(spec, name, config, backend=backend, observer=observer, open_judge=open_judge)
            members.append(NamedReward(name=name, spec=spec, reward=reward, observer=observer))
    except BaseException:
        OpenedRewards(members).close()
        raise
    return OpenedRewards(members)


def _open(
    spec: RewardSpec, name: str, config: Config, *, backend: str, observer: Observer, open_judge: FindJudge
) -> Reward:
    def warn(sentence: str) -> None:
        observer.on_event(Warned(message=f"the reward {name}: {sentence}"))

    memory = int(config.reward_memory * 2**30)
    limits = Limits(time_s=parse_duration(config.reward_timeout), memory_bytes=memory)
    if spec.kind == FUNCTION:

        def say(text: str) -> None:
            observer.on_event(RewardPrinted(reward=name, text=text))

        file = Path(spec.argument).expanduser()
        return FunctionReward(file, spec.function, text=spec.text, limits=limits, say=say)
    if spec.kind in ("regex", "json"):
        function, bound = "matches", dict[str, Any](pattern=spec.argument)
        if spec.kind == "json":
            function, bound = "is_json", {"schema": read_schema(spec.argument) if spec.argument else None}
        return PatternReward(function, text=spec.text, bound=bound, limits=limits)
    if spec.kind == "code":
        return CodeReward(column=spec.argument, limits=limits, warn=warn)
    if spec.kind == "judge":
        return JudgeReward(spec.argument, find=open_judge, backend=backend, observer=observer)
    if spec.kind == "server":
        rubric = read_rubric(config.rubric)
        key, remote = reward_key(), config.allow_remote_rewards
        server = connect_server(spec.argument, api_key=key, allow_remote=remote)
        patience_s = parse_duration(config.reward_patience)
        return ServerReward(server=server, rubric=rubric, patience_s=patience_s, warn=warn)
    return CheckReward(spec)


def _names(specs: Sequence[RewardSpec], *, watched: bool) -> list[str]:
    """Return a unique name for each reward: of its function, of its judge's run, or of its kind."""
    names = [_name(spec) for spec in specs]
    if watched:
        names[-1] = f"{WATCHED}{names[-1].removeprefix('judge_')}"
    found: list[str] = []
    for name in names:
        others = (f"{name}_{number}" for number in itertools.count(2))
        found.append(next(each for each in itertools.chain([name], others) if each not in found))
    return found


def _name(spec: RewardSpec) -> str:
    if spec.kind == FUNCTION:
        return spec.function
    if spec.kind == "judge":
        return re.sub(r"[^\w.-]+", "_", f"judge_{Path(spec.argument).expanduser().absolute().name}")
    return spec.kind
