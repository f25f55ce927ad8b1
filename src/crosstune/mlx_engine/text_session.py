"""A session of a language model: logits, vectors of rows, and generated answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from crosstune.core.answers import Answer
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.out_of_memory import EVALUATING, GENERATING
from crosstune.core.protocols import Array, Batch, PreparedBatch
from crosstune.mlx_engine.generate import sample
from crosstune.mlx_engine.limits import memory_errors
from crosstune.mlx_engine.session import MlxSession
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLM
from crosstune.process.ranks import SingleProcess


class TextSession(MlxSession):
    """The session of a causal language model."""

    def logits(self, prompts: Prompts) -> Logits:
        """Return the logits in the precision of training, without dropout."""
        return [np.array(self.model(mx.array([list(prompt)]))[0].astype(mx.float32)) for prompt in prompts]

    def map_batches(self, batches: Iterable[Batch], compute: Callable[[Arrays], mx.array]) -> list[Array]:
        """Return a vector for each batch, computed without gradients; the processes share the work."""
        found: dict[int, Array] = {}
        with self._agreeing(EVALUATING):
            for index, batch in enumerate(batches):
                if self._on_this_rank(index):
                    found[index] = np.array(compute(self._to_device(self.prepare(batch))).astype(mx.float32))
        return self.gather_vectors(found)

    def own_prompts(self, count: int) -> range:
        return self.own_share(count)

    def own_share(self, count: int) -> range:
        ranks = (self.group or SingleProcess()).ranks
        return range(ranks.rank, count, ranks.size)

    def gather_vectors(self, own: Mapping[int, Array]) -> list[Array]:
        return (self.group or SingleProcess()).gather_vectors(own)

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        return [answer.content for answer in self.sample(prompts, **options)]

    def sample(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Answer]:
        """Call mlx_engine.generate.sample with the model."""
        with memory_errors(doing=GENERATING):
            found = sample(self.model, prompts, **options)
        mx.clear_cache()
        return found

    @property
    def _language_task(self) -> CausalLM:
        assert isinstance(self.task, CausalLM)
        return self.task

    def _evaluation_loss(self) -> tuple[Callable[[Arrays], tuple[mx.array, MetricSums]], Sequence[str]]:
        return self._language_task.evaluate, self._language_task.eval_metric_names

    def _check_batches(self, batches: Sequence[PreparedBatch]) -> None:
        for batch in batches:
            self._language_task.check_batch(batch.arrays)

    def _seed_from(self, key: mx.array) -> None:
        """Do nothing: adapters get their keys, and a compiled step cannot use the global generator."""

    def _save_model(self, folder: Path) -> None:
        self._language_task.write_model(self.model, folder)

    def _base_record(self) -> dict[str, Any]:
        return self._language_task.base_record()
