"""Judge items with a session's model: by the probabilities of the labels, a generated verdict, a scalar head, or rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from crosstune.core.protocols import Generates, Task
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.judge.examples import (
    LabelTokens,
    common_length,
    encode_answers,
    encode_prompts,
    find_label_tokens,
)
from crosstune.recipes.judge.items import WINNERS, Item, other_winner, swapped
from crosstune.recipes.judge.metrics import Floats, fit_temperature, log_softmax, soften
from crosstune.recipes.judge.verdicts import JudgeSettings, VerdictFormat
from crosstune.recipes.sft import engine_parts

Progress = Callable[[int, int], None]
Prompts = Sequence[list[int]]
MIN_SHARED = 8
"""Minimum length of a shared prefix that is computed once."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A judge's verdict on an item."""

    score: float | None = None
    """None if the generated verdict cannot be read; None for pairs."""
    winner: str | None = None
    probabilities: tuple[float, ...] = ()
    """Uncalibrated probability of each label."""
    confidence: float | None = None
    """Calibrated probability that the score is at most a point off, or that the winner is right."""
    consistent: bool | None = None
    """For pairs: True if both orders of the answers have the same winner."""
    rewards: tuple[float, ...] = ()
    """The reward of each answer of a pair."""
    text: str = ""
    issues: tuple[str, ...] = ()
    feedback: str = ""
    too_long: bool = False
    """True if the prompt does not fit into the model's context, and was not judged."""

    @property
    def is_parsed(self) -> bool:
        return self.score is not None or self.winner is not None


@dataclass(frozen=True, kw_only=True)
class Judge:
    session: Any
    tokenizer: Tokenizer
    settings: JudgeSettings
    batch_size: int = 16
    share_prefixes: bool = True
    max_tokens: int | None = None
    """The model's context. A longer prompt is not judged, and its verdict counts as unreadable."""

    @cached_property
    def verdict(self) -> VerdictFormat:
        return self.settings.format()

    @cached_property
    def tokens(self) -> LabelTokens:
        return find_label_tokens(self.verdict, self.tokenizer)

    def _fitting(self, prompts: Prompts) -> list[int]:
        """Return the indices of the prompts that fit into the context, with the longest label."""
        label = 0 if self.settings.is_reward else max(map(len, self.tokens.sequences))
        longest = self.max_tokens - label if self.max_tokens is not None else math.inf
        return [place for place, prompt in enumerate(prompts) if len(prompt) <= longest]

    def judge(
        self,
        items: Sequence[Item],
        *,
        by: str = "probabilities",
        max_new_tokens: int = 256,
        progress: Progress | None = None,
    ) -> list[Judgement]:
        """Judge every item; pairs in both orders. `progress` gets the number of finished prompts and their total."""
        if not items:
            return []
        if self.settings.is_reward:
            return self._judge_by_rewards(items, progress=progress)
        is_pair = items[0].is_pair
        asked = [*items, *(swapped(item) for item in items)] if is_pair else items
        prompts = self.prompts(asked)
        fitting = self._fitting(prompts)
        chosen = [prompts[place] for place in fitting]
        if self.settings.head == "scalar":
            judged = self._judge_by_scalar(chosen, progress=progress)
        elif by == "generation":
            texts = self._generate(chosen, max_new_tokens=max_new_tokens, progress=progress)
            judged = [self._read(text) for text in texts]
        else:
            log_probs = self._log_probs([asked[place] for place in fitting], chosen, progress=progress)
            judged = [self._from_log_probs(row) for row in log_probs]
        found = [Judgement(too_long=True)] * len(asked)
        for place, one in zip(fitting, judged, strict=True):
            found[place] = one
        if not is_pair:
            return found
        return [self._combine(*both) for both in zip(found[: len(items)], found[len(items) :], strict=True)]

    def generate(self, items: Sequence[Item], *, max_new_tokens: int) -> list[str]:
        """Return the verdicts that the model writes."""
        return self._generate(self.prompts(items), max_new_tokens=max_new_tokens)

    def prompts(self, items: Sequence[Item]) -> list[list[int]]:
        """Return the tokens of each item up to its label."""
        return encode_prompts(items, verdict=self.verdict, tokens=self.tokens, tokenizer=self.tokenizer)

    def fit_temperature(self, items: Sequence[Item], found: Sequence[Judgement]) -> float:
        """Return the temperature that calibrates the probabilities; 1 if there are no probabilities."""
        rows = [(item, one) for item, one in zip(items, found, strict=True) if one.probabilities]
        if not rows:
            return 1.0
        probs, labels = np.array([one.probabilities for _, one in rows]), self.verdict.labels
        targets = [
            labels.distribution(item.score)
            if item.score is not None
            else np.eye(len(labels))[self.verdict.label_of(item)]
            for item, _ in rows
        ]
        return fit_temperature(np.log(np.maximum(probs, 1e-30)), np.array(targets))

    def _generate(
        self, prompts: Prompts, *, max_new_tokens: int, progress: Progress | None = None
    ) -> list[str]:
        assert isinstance(self.session, Generates), "a judge with score tokens generates"
        done = itertools.count(1)
        answers = self.session.sample(
            self._without_opening(prompts),
            max_new_tokens=max_new_tokens,
            stop_ids=sorted(self.tokenizer.stop_ids),
            on_answer=lambda _: progress(next(done), len(prompts)) if progress is not None else None,
        )
        return [self.tokenizer.decode(answer.content).strip() for answer in answers]

    def _judge_by_scalar(self, prompts: Prompts, *, progress: Progress | None) -> list[Judgement]:
        scale, prompts = self.verdict.scale, self._without_opening(prompts)
        found = self._head_outputs(prompts, range(len(prompts)), progress)
        clipped = (float(np.clip(found[place], 0, 1)) for place in range(len(prompts)))
        return [Judgement(score=scale.low + scale.span * share) for share in clipped]

    def _judge_by_rewards(self, items: Sequence[Item], *, progress: Progress | None) -> list[Judgement]:
        """Return the reward of each single answer, or the winner of each pair."""
        prompts = encode_answers(items, tokenizer=self.tokenizer)
        rewards = self._head_outputs(prompts, self._fitting(prompts), progress)
        judged, places = list[Judgement](), itertools.count()
        for item in items:
            own = [rewards.get(next(places)) for _ in item.answers]
            known = tuple(reward for reward in own if reward is not None)
            is_whole = len(known) == len(own)
            judged.append(self._from_rewards(known) if is_whole else Judgement(too_long=True))
        return judged

    def _head_outputs(
        self, prompts: Prompts, places: Sequence[int], progress: Progress | None
    ) -> dict[int, float]:
        """Return the output of the scalar head for the prompts at these indices."""
        parts, found = engine_parts("judge", self.session.plan.engine), dict[int, float]()
        for _, chosen in self._batches(prompts, [places], progress):
            values = parts.scalar_scores(self.session, [prompts[place] for place in chosen])
            found |= dict(zip(chosen, map(float, values), strict=True))
        return found

    def _from_rewards(self, rewards: tuple[float, ...]) -> Judgement:
        """Compare two rewards as Bradley and Terry: the probability that A is better is the sigmoid of the difference."""
        if len(rewards) == 1:
            return Judgement(score=rewards[0])
        probs = log_softmax(np.array([*rewards, -1e4]))
        found = replace(self._from_log_probs(probs), rewards=rewards)
        return replace(found, winner="tie") if rewards[0] == rewards[1] else found

    def _without_opening(self, prompts: Prompts) -> list[Any]:
        """Return prompts without the verdict's start."""
        return [prompt[: len(prompt) - len(self.tokens.before)] for prompt in prompts]

    def _log_probs(self, items: Sequence[Item], prompts: Prompts, *, progress: Progress | None) -> Floats:
        """Return the log probability of each label for each item, normalized over the labels."""
        known: list[dict[tuple[int, ...], Floats]] = [{} for _ in items]
        parts, current = engine_parts("judge", self.session.plan.engine), None
        prefix, start = None, 0
        for group, places in self._batches(prompts, self._groups(items), progress):
            if group is not current:
                shared, current = self._num_shared(prompts, group), group
                prefix = parts.read_prefix(self.session, prompts[group[0]][:shared]) if shared else None
                start = shared if prefix is not None else 0
            for probe in self.tokens.probes:
                found = parts.next_log_probs(
                    self.session,
                    [[*prompts[place][start:], *probe] for place in places],
                    token_ids=self.tokens.token_ids,
                    last=len(probe) + 1,
                    prefix=prefix,
                )
                for place, values in zip(places, found, strict=True):
                    known[place] |= {probe[:length]: value for length, value in enumerate(values)}
        return self.tokens.log_probs(known)

    def _from_log_probs(self, log_probs: Floats) -> Judgement:
        probs = np.exp(log_probs)
        calibrated = soften(probs, self.settings.temperature)
        kept = tuple(probs.tolist())
        if self.verdict.name == "winner":
            best = int(probs.argmax())
            return Judgement(winner=WINNERS[best], probabilities=kept, confidence=float(calibrated[best]))
        values = np.array(self.verdict.labels.values)
        score = float((probs * values).sum() / probs.sum())
        near = np.abs(values - score) <= self.verdict.scale.point
        return Judgement(score=score, probabilities=kept, confidence=float(calibrated[near].sum()))

    def _read(self, text: str) -> Judgement:
        said, is_pair = self.verdict.read(text), self.verdict.name == "winner"
        return Judgement(
            score=None if is_pair else said.score,
            winner=said.winner if is_pair else None,
            text=text,
            issues=said.issues,
            feedback=said.feedback,
        )

    def _combine(self, one: Judgement, other: Judgement) -> Judgement:
        """Combine the verdicts of both orders: mean probabilities, or the winner if both agree, else a tie. One unreadable
        verdict makes the pair unreadable."""
        turned = other_winner(other.winner)
        consistent = one.winner == turned and one.winner is not None
        if one.winner is None or turned is None:
            too_long = one.too_long or other.too_long
            unread = replace(one, winner=None, probabilities=(), confidence=None)
            return replace(unread, consistent=False, too_long=too_long)
        if one.probabilities:
            a, b, tie = other.probabilities
            mean = (np.array(one.probabilities) + np.array([b, a, tie])) / 2
            return replace(self._from_log_probs(np.log(np.maximum(mean, 1e-300))), consistent=consistent)
        return replace(one, winner=one.winner if consistent else "tie", consistent=consistent)

    def _groups(self, items: Sequence[Item]) -> list[list[int]]:
        """Group items with the same rubric and system message: their prompts share a prefix."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for place, item in enumerate(items):
            start = item.messages[0] if item.messages and item.messages[0].get("role") == "system" else {}
            groups.setdefault((item.rubric, str(start.get("content", ""))), []).append(place)
        return list(groups.values())

    def _num_shared(self, prompts: Prompts, group: Sequence[int]) -> int:
        """Return the length of the common prefix of a group; 0 if it is not worth sharing."""
        if not self.share_prefixes or len(group) < 2:
            return 0
        grouped = [prompts[place] for place in group]
        length = min(common_length(grouped), min(map(len, grouped)) - 1)
        return length if length >= MIN_SHARED else 0

    def _batches(
        self, prompts: Prompts, groups: Sequence[Sequence[int]], progress: Progress | None
    ) -> Iterator[tuple[Sequence[int], list[int]]]:
        """Yield each group with batches of its prompts, of similar length; report the progress after each."""
        done = 0
        for group in groups:
            ordered = sorted(group, key=lambda place: (len(prompts[place]), place))
            for start in range(0, len(ordered), self.batch_size):
                places = ordered[start : start + self.batch_size]
                yield group, places
                done += len(places)
                if progress is not None:
                    progress(done, len(prompts))


def judge_task(head: str, engine: str) -> Task:
    """Return the task of a head."""
    parts = engine_parts("judge", engine)
    return parts.ScalarHead() if head == "scalar" else parts.ScoreTokens()
