"""Train and run a judge with MLX: label tokens with soft targets, and their probabilities after shared prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.mlx_engine.limits import memory_errors
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLM
from crosstune.recipes.judge.examples import JudgeBatch


class ScoreTokens(CausalLM):
    """A language model with soft targets: a target may be divided between two tokens."""

    eval_metric_names = ()

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:  # type: ignore[override]
        arrays = dict(super().arrays(batch))
        count = len(arrays["places"])
        return arrays | {
            "others": self.at_places(batch.others, batch, count),
            "shares": self.at_places(batch.shares, batch, count),
        }

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.prepared(arrays)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The keys and values of a prefix that several prompts share, for each layer."""

    states: Sequence[Sequence[mx.array]]
    length: int

    def repeated(self, count: int) -> list[KVCache]:
        caches = []
        for keys, values in self.states:
            cache = KVCache()
            cache.keys, cache.values = (mx.repeat(array, count, axis=0) for array in (keys, values))
            cache.offset = self.length
            caches.append(cache)
        return caches


def read_prefix(session: Any, tokens: Sequence[int]) -> Prefix | None:
    """Compute the keys and values of a prefix; None for a model with a different kind of cache."""
    caches = make_prompt_cache(session.model)
    if any(type(cache) is not KVCache for cache in caches):
        return None
    with memory_errors(doing=EVALUATING):
        session.model(mx.array([list(tokens)]), cache=caches)
        # The arrays of a cache are longer than its contents.
        states = [
            tuple(array[..., : cache.offset, :] for array in (cache.keys, cache.values)) for cache in caches
        ]
        mx.eval(states)
    return Prefix(states=states, length=len(tokens))


def next_log_probs(
    session: Any,
    rows: Sequence[Sequence[int]],
    *,
    token_ids: Sequence[int],
    last: int,
    prefix: Prefix | None = None,
) -> NDArray[np.float64]:
    """Return the log probabilities of `token_ids` after each of the `last` positions of each row, in fp32.

    Rows are padded on the right: attention is causal, so no token attends to the padding.
    """
    width = max(map(len, rows))
    ids = np.zeros((len(rows), width), dtype=np.int32)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
    ends = np.array([number * width + len(row) for number, row in enumerate(rows)])
    places = (ends[:, None] + np.arange(-last, 0)).reshape(-1)
    options = {"cache": prefix.repeated(len(rows))} if prefix is not None else {}
    with memory_errors(doing=EVALUATING):
        logits = session.task.prepared.logits_at(mx.array(ids), mx.array(places), **options).astype(
            mx.float32
        )
        log_probs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = log_probs[:, mx.array(list(token_ids))]
        mx.eval(chosen)
    return np.array(chosen).astype(np.float64).reshape(len(rows), last, len(token_ids))
