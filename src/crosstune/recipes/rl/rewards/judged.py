"""Score answers with a judge or reward model trained here, or with a model behind an OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import gc
import time
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from crosstune.core.errors import UserError, shown
from crosstune.core.events import Observer
from crosstune.core.rewards import RewardUnavailable, ScoredAnswer
from crosstune.files.openai_client import LOOPBACK_NAMES, RequestRejected, ServerAway, ServerModel, connect
from crosstune.recipes.judge.items import Item, Scale, Score, Scorer, answer_item
from crosstune.recipes.judge.verdicts import VerdictFormat, prompt_messages
from crosstune.recipes.rl.rewards.answer_checks import Reward, Scores

_SCALE = Scale(low=0.0, high=10.0)
_FORMAT = VerdictFormat(name="score", scale=_SCALE)
_MAX_NEW_TOKENS = 2048
_MOST_AT_ONCE = 8
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
TOO_LONG = "it exceeds the judge's context"


class FindJudge(Protocol):
    """Find a trained judge or reward model without loading it; raise a UserError if there is none."""

    def __call__(self, name: str, *, backend: str) -> Scorer: ...


class JudgeReward(Reward):
    """Scores of a judge, rescaled to 0-1, or the unchanged rewards of a reward model. The judge is loaded when the first
    answers are scored, and reads text with its own tokenizer."""

    def __init__(self, run: str, *, find: FindJudge, backend: str, observer: Observer) -> None:
        self._scorer, self._observer = find(run, backend=backend), observer
        self._score: Score | None = None
        if self._scorer.compares:
            raise UserError(
                f"The judge {shown(run)} cannot give rewards.",
                why="it compares two answers, and cannot score a single one.",
                do="train one with scores, or a reward model: crosstune judge train --head scalar",
            )

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        if self._score is None:
            self._score = self._scorer.open(self._observer)
        found = self._score([_item(one, place) for place, one in enumerate(answers)])
        low, span = self._scorer.low, self._scorer.span
        has_scale = span < float("inf")
        return [TOO_LONG if one is None else (one - low) / span if has_scale else one for one in found]

    def identity(self) -> Any:
        return self._scorer.content()

    def close(self) -> None:
        self._score = None
        gc.collect()  # a session has reference cycles


@dataclass(kw_only=True)
class ServerReward(Reward):
    """Scores from 0 to 1 by a model behind a server. The model reads the rubric, the conversation and the answer."""

    server: ServerModel
    rubric: str
    patience_s: float
    """The run ends if the server does not reply for this time."""
    warn: Callable[[str], None]

    def score(self, answers: Sequence[ScoredAnswer]) -> Scores:
        """Score the answers. If the server does not respond, retry with growing waits, and finally raise
        RewardUnavailable."""
        found: dict[int, float | str | None] = {}
        waited_s, wait_s = 0.0, _FIRST_WAIT_S
        while missing := [place for place in range(len(answers)) if place not in found]:
            away = self._ask([answers[place] for place in missing], missing, found)
            if away is None:
                continue
            if len(missing) > len(answers) - len(found):  # some were answered
                waited_s, wait_s = 0.0, _FIRST_WAIT_S
            if waited_s >= self.patience_s:
                raise RewardUnavailable(
                    f"The reward server {self.server.url} did not come back within {waited_s:.0f} s.",
                    why=" ".join(filter(None, (away.message, away.why))),
                    do="start it again, then continue the run with --resume auto; --reward_patience sets how long a run waits",
                ) from away
            wait_s = min(wait_s, self.patience_s - waited_s)
            self.warn(f"{away.message} {away.why} Trying again in {wait_s:.3g} s.")
            time.sleep(wait_s)
            waited_s, wait_s = waited_s + wait_s, min(2 * wait_s, _LONGEST_WAIT_S)
        return [found[place] for place in range(len(answers))]

    def identity(self) -> Any:
        return [self.server.name, self.rubric]

    def _ask(
        self, answers: Sequence[ScoredAnswer], places: Sequence[int], found: dict[int, float | str | None]
    ) -> ServerAway | None:
        """Add the scores that the server gives, and return its last failure if some are missing."""
        with ThreadPoolExecutor(_MOST_AT_ONCE) as pool:
            replies = list(pool.map(self._score, answers))
        for place, reply in zip(places, replies, strict=True):
            if not isinstance(reply, ServerAway):
                found[place] = reply
        return next((reply for reply in reversed(replies) if isinstance(reply, ServerAway)), None)

    def _score(self, one: ScoredAnswer) -> float | str | ServerAway:
        item = replace(_item(one, 0), rubric=self.rubric)
        try:
            said = self.server.complete(prompt_messages(item, _FORMAT), max_new_tokens=_MAX_NEW_TOKENS)
        except ServerAway as error:
            return error
        except RequestRejected as error:
            return " ".join(filter(None, (error.message, error.why)))
        score = _FORMAT.read(said.rpartition("</think>")[2].strip()).score
        if score is None:
            return f"the server wrote no score from 0 to 10: {shown(said)}"
        return (score - _SCALE.low) / _SCALE.span


def connect_server(address: str, *, api_key: str, allow_remote: bool) -> ServerModel:
    """Return the model named in `URL#MODEL`; for `URL`, the first model that the server lists."""
    url, _, name = address.partition("#")
    host = None
    with contextlib.suppress(ValueError):  # `connect` rejects it
        host = urllib.parse.urlsplit(url if "://" in url else f"http://{url}").hostname
    if host is not None and host not in LOOPBACK_NAMES and not allow_remote:
        raise UserError(
            f"The reward server {shown(url)} is on another machine.",
            why="all prompts and answers of the training would be sent to it.",
            do="add --allow_remote_rewards if they may leave this machine",
        )
    return connect(url, name=name or None, api_key=api_key)


def _item(one: ScoredAnswer, number: int) -> Item:
    reference = one.columns.get("reference")
    return answer_item(one.prompt, (one.answer,), number, reference if isinstance(reference, str) else "")
