"""Distill on the student's own answers: in a fraction of the steps, it answers the data's prompts with its current weights."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.protocols import Array, DividesPrompts, Metrics, Session
from crosstune.core.sampling import Sampling
from crosstune.data.batches.token_batch import Example, pad_rows, split_rows
from crosstune.recipes.distill.recipe import DistillBatch, DistillRecipe


class OnPolicyRecipe(DistillRecipe):
    """Distillation with some steps on the student's own answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._metrics: dict[str, float] = {}
        self._most_prompt = max(map(prompt_length, self.train))
        if self._most_prompt < 2:
            raise UserError(
                f"The rows of {self.config.dataset} have no prompts that the student could answer.",
                why="--on_policy_share trains on its own answers, and every token of a row is supervised.",
                do="use conversations, or remove --on_policy_share",
            )

    def is_on_policy(self, step: int) -> bool:
        """Return True if a step trains on the student's own answers; such steps are spread evenly."""
        share = self.config.on_policy_share
        return int((step + 1) * share + 1e-9) > int(step * share + 1e-9)

    def make_batches(self, session: Session, step: int, *, observer: Observer) -> Sequence[DistillBatch]:
        self._metrics = {"on_policy": float(self.is_on_policy(step))}
        if not self.is_on_policy(step):
            return self.micro_batches(step)
        started = time.perf_counter()
        asked = [self.train[row[0]] for row in self._order().rows(step)]
        answers = self._own_answers(
            session, [one.tokens[: prompt_length(one)].tolist() for one in asked], step=step
        )
        examples = [self._with_answer(one, answer) for one, answer in zip(asked, answers, strict=True)]
        self._metrics["completions/mean_length"] = float(np.mean([len(answer) for answer in answers]))
        self._metrics["time/generate_s"] = time.perf_counter() - started
        rows = split_rows(examples, batch_size=self.config.batch_size, pad_id=self.tokenizer.pad_id)
        return [DistillBatch(tokens=tokens, ce_weight=0.0) for tokens in rows]

    def batch_metrics(self, step: int) -> Metrics:
        return self._metrics

    def carried_state(self) -> Mapping[str, Array]:
        """Return nothing: a step depends on the weights and its number."""
        return {}

    def carry_on(self, state: Mapping[str, Array], *, step: int) -> None:
        """Load nothing."""

    def longest_row(self) -> int:
        own = min(self.train.limit, self._most_prompt + self.config.max_new_tokens)
        return max(super().longest_row(), own)

    def longest_target(self) -> int:
        return max(super().longest_target(), min(self.train.limit, self.config.max_new_tokens))

    def longest_batch(self, size: int) -> DistillBatch:
        longest = max(self.train, key=prompt_length)
        answer = np.full(self.config.max_new_tokens, self.tokenizer.pad_id, dtype=np.int32)
        own = self._with_answer(longest, answer)
        if len(own.tokens) <= super().longest_row():
            return super().longest_batch(size)
        return DistillBatch(tokens=pad_rows([own] * size, pad_id=self.tokenizer.pad_id), ce_weight=0.0)

    def _own_answers(self, session: Session, prompts: Sequence[Sequence[int]], *, step: int) -> list[Array]:
        """Return the answers of the student with its current weights. The processes share the distinct prompts."""
        assert isinstance(session, DividesPrompts), "the task of this recipe generates"
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        own = {distinct[number] for number in session.own_prompts(len(distinct))}
        places = [place for place, prompt in enumerate(prompts) if tuple(prompt) in own]
        config, shortest = self.config, min(map(len, prompts))
        found = session.sample(
            [prompts[place] for place in places],
            max_new_tokens=min(config.max_new_tokens, self.train.limit - shortest),
            stop_ids=sorted(self.tokenizer.stop_ids),
            sampling=Sampling(
                temperature=config.distill_temperature, seed=((config.seed << 32) + step) % 2**63
            ),
        )
        vectors = {
            place: np.array(answer.tokens, np.float32) for place, answer in zip(places, found, strict=True)
        }
        return [vector.astype(np.int32) for vector in session.gather_vectors(vectors)]

    def _with_answer(self, one: Example, answer: Array) -> Example:
        """Return a prompt with another answer, within the context."""
        start, limit = prompt_length(one), self.train.limit
        tokens = np.concatenate([one.tokens[:start], answer])[:limit]
        return replace(one, tokens=tokens, supervised=np.arange(len(tokens)) >= start)


def prompt_length(one: Example) -> int:
    """Return the number of tokens before the last answer."""
    last = int(np.flatnonzero(one.supervised)[-1])
    before = np.flatnonzero(~one.supervised[:last])
    return int(before[-1]) + 1 if len(before) else 0
