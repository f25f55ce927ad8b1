"""Generate answers by continuous batching over mlx-lm's batch caches."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from crosstune.core.answers import Answer, Earlier, OnAnswer, OnToken, Question, group_equal
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.mlx_engine.device import free_memory

_NEVER = float("-inf")
MOST_ROWS = 64
_PACK = 2048
"""Tokens of prompts computed at once, with their padding."""
_USED_SHARE = 0.5
"""The fraction of free memory for the caches."""
_STEP = 256
"""Columns that a cache of mlx-lm allocates at once."""


def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampling: Sampling = GREEDY,
    earlier: Earlier | None = None,
    on_token: OnToken | None = None,
    on_answer: OnAnswer | None = None,
) -> list[Answer]:
    """Return an answer to each prompt. A prompt is computed once for all of its answers that fit, and finished rows are
    replaced by waiting prompts. The random state of the run does not change.
    """
    longest = max(map(len, prompts), default=0)
    num_rows = min(len(prompts), plan_rows(model, columns=longest + max_new_tokens)) if longest else 0
    if num_rows > 1 and not supports_padding(model):
        num_rows = 1
    batch = _Batch(model, num_rows, max_new_tokens=max_new_tokens, stop_ids=stop_ids, sampling=sampling)
    batch.on_token = on_token if len(prompts) == 1 else None
    batch.on_answer = on_answer
    batch.run(prompts, earlier)
    return [batch.answers[place] for place in range(len(prompts))]


def plan_rows(model: Any, *, columns: int) -> int:
    """Return the number of rows whose caches of this many columns fit into the free memory."""
    caches = make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)  # lazy: nothing is allocated yet
    cache_bytes = sum(cache.nbytes for cache in caches) * -(-columns // _STEP)
    return max(1, min(MOST_ROWS, int(_USED_SHARE * free_memory()) // max(1, cache_bytes)))


class _Row:
    """An answer that is being generated."""

    def __init__(self, question: Question, number: int, sampling: Sampling, count: int) -> None:
        self.prompt, self.place = question.prompt, question.places[number]
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.numbers = question.draws(sampling, number, count).astype(np.float32)


class _Batch:
    """The answers of a call: the waiting answers, and the caches of the answers in rows."""

    on_token: OnToken | None = None
    on_answer: OnAnswer | None = None

    def __init__(
        self, model: Any, num_rows: int, *, max_new_tokens: int, stop_ids: Sequence[int], sampling: Sampling
    ) -> None:
        self.model, self.num_rows, self.most = model, num_rows, max_new_tokens
        self.stop_ids, self.sampling = frozenset(stop_ids), sampling
        self.answers: dict[int, Answer] = {}
        self.waiting: deque[_Row] = deque()
        self.rows: list[_Row] = []
        self.caches: list[Any] = []

    def run(self, prompts: Sequence[Sequence[int]], earlier: Earlier | None) -> None:
        self.waiting.extend(
            _Row(question, number, self.sampling, self.most)
            for question in group_equal(prompts, earlier)
            for number in range(len(question.places))
        )
        while self.waiting or self.rows:
            free = self.num_rows - len(self.rows)
            if self.waiting and free >= min(len(self.waiting), max(1, self.num_rows // 8)):
                self._fill(free)
            else:
                tokens = mx.array([[row.tokens[-1]] for row in self.rows])
                kept = self._choose(self.rows, self.model(tokens, cache=self.caches)[:, -1])
                if 0 < len(kept) < len(self.rows):
                    for cache in self.caches:
                        cache.filter(kept)
                self.rows = [self.rows[place] for place in kept]

    def _fill(self, count: int) -> None:
        """Compute the prompts of waiting answers, choose their first tokens, and add their rows to the caches."""
        taken = [self.waiting.popleft() for _ in range(min(count, len(self.waiting)))]
        if self.most < 1:
            for row in taken:
                self.answers[row.place] = Answer(tokens=[], log_probs=[], stopped=False)
            return
        groups = [[*group] for _, group in itertools.groupby(taken, key=lambda row: row.prompt)]
        while groups:
            pack = groups[: max(1, _PACK // len(groups[0][0].prompt))]
            groups = groups[len(pack) :]
            prompts = [group[0].prompt for group in pack]
            padding = [len(prompts[0]) - len(prompt) for prompt in prompts]
            single = self.num_rows == 1
            caches = make_prompt_cache(self.model) if single else batch_caches(self.model, padding)
            assert caches is not None, "tested by supports_padding"
            padded = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
            logits = self.model(mx.array(np.array(padded, np.int32)), cache=caches)[:, -1]
            rows = [row for group in pack for row in group]
            sources = [number for number, group in enumerate(pack) for _ in group]
            kept = self._choose(rows, logits[mx.array(sources)])
            if not kept:
                continue
            if not single:
                for cache in caches:
                    cache.filter([sources[place] for place in kept])
            if self.rows:
                for cache, new in zip(self.caches, caches, strict=True):
                    cache.extend(new)
            else:
                self.caches = caches
            self.rows += [rows[place] for place in kept]

    def _choose(self, rows: Sequence[_Row], logits: mx.array) -> list[int]:
        """Append a token to each row, collect the finished answers, and return the indices of the others."""
        seen = None
        if self.sampling.repetition_penalty != 1:
            marks = np.zeros(logits.shape, dtype=np.bool_)
            for place, row in enumerate(rows):
                marks[place, [*row.prompt, *row.tokens]] = True
            seen = mx.array(marks)
        numbers = mx.array(np.array([row.numbers[len(row.tokens)] for row in rows]))
        tokens, log_probs = choose_tokens(logits, numbers, self.sampling, seen)
        chosen, values, kept = np.array(tokens), np.array(log_probs), list[int]()
        for place, row in enumerate(rows):
            token = int(chosen[place])
            row.tokens.append(token)
            row.log_probs.append(float(values[place]))
            if self.on_token is not None:
                self.on_token(token)
            stopped = token in self.stop_ids
            if stopped or len(row.tokens) == self.most:
                answer = Answer(tokens=row.tokens, log_probs=row.log_probs, stopped=stopped)
                self.answers[row.place] = answer
                if self.on_answer is not None:
                    self.on_answer(answer)
            else:
                kept.append(place)
        return kept


def supports_padding(model: Any) -> bool:
    """True if left-padded rows have the same logits as single rows, tested once per model: some ignore a row's mask."""
    if not hasattr(model, "supports_padding"):
        rows, padding = mx.arange(1, 41).reshape(5, 8), [0, 1, 2, 4, 5]
        caches = batch_caches(model, padding)
        if caches is None:
            model.supports_padding = False
            return False
        try:
            together = model(rows, cache=caches)[:, -1]
            alone = mx.concatenate(
                [model(rows[row : row + 1, pad:])[:, -1] for row, pad in enumerate(padding)]
            )
            limit = 0.05 * mx.abs(alone).max()
            model.supports_padding = bool(mx.abs(together - alone).max() <= limit)
        except (ValueError, TypeError, AttributeError, IndexError):
            model.supports_padding = False
    return bool(model.supports_padding)


def batch_caches(model: Any, padding: list[int]) -> list[Any] | None:
    """Return mlx-lm's caches for left-padded rows, or None if the model uses a different type of cache."""
    batched: list[Any] = []
    for cache in make_prompt_cache(model):
        if type(cache) is KVCache:
            batched.append(BatchKVCache(padding))
        elif type(cache) is RotatingKVCache:
            batched.append(BatchRotatingKVCache(cache.max_size, padding))
        else:
            return None
    return batched


def choose_tokens(
    logits: mx.array, numbers: mx.array, sampling: Sampling, seen: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return a token for each row of logits, chosen by a uniform number, and its log probability before filters and penalties.
    `seen` marks the tokens under the repetition penalty."""
    logits, temperature = logits.astype(mx.float32), sampling.temperature
    allowed = logits if seen is None else penalize(logits, seen, sampling.repetition_penalty)
    if temperature > 0:
        logits, allowed = logits / temperature, allowed / temperature
        sums = mx.cumsum(mx.softmax(filter_logits(allowed, sampling), axis=-1), axis=-1)
        passed = (sums <= numbers[:, None] * sums[:, -1:]).sum(axis=-1)
        tokens = mx.minimum(passed, logits.shape[-1] - 1)
    else:
        tokens = mx.argmax(allowed, axis=-1)
    chosen = mx.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - mx.logsumexp(logits, axis=-1)


def penalize(logits: mx.array, seen: mx.array, penalty: float) -> mx.array:
    """Make the tokens marked in `seen` less likely."""
    return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


def filter_logits(logits: mx.array, sampling: Sampling) -> mx.array:
    """Set the logits of excluded tokens to minus infinity."""
    if sampling.top_k:
        count = min(sampling.top_k, logits.shape[-1])
        least = mx.topk(logits, count, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits < least, _NEVER, logits)
    if sampling.top_p < 1:
        order = mx.argsort(logits, axis=-1)
        ascending = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1)
        dropped = mx.cumsum(ascending, axis=-1) <= 1 - sampling.top_p
        dropped[..., -1] = False
        logits = mx.where(mx.put_along_axis(mx.zeros_like(dropped), order, dropped, axis=-1), _NEVER, logits)
    if sampling.min_p > 0:
        shares = mx.softmax(logits, axis=-1)
        least = sampling.min_p * shares.max(axis=-1, keepdims=True)
        logits = mx.where(shares < least, _NEVER, logits)
    return logits
