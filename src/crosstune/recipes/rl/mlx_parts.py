"""Reinforcement learning with MLX: the loss of generated answers, and their log probabilities before a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from crosstune.core.protocols import Array
from crosstune.mlx_engine import array_functions
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLoss
from crosstune.mlx_engine.tasks.token_losses import Weights
from crosstune.recipes.preference.mlx_parts import ForkedLM, ReferenceLoss, detached
from crosstune.recipes.rl.losses import RlLoss, loss_and_metrics, metric_names
from crosstune.recipes.rl.rollouts import RolloutBatch


class RlLM(ForkedLM):
    """A language model with a loss over the log probabilities of its own answers."""

    def __init__(self, loss: RlLoss) -> None:
        self.rl = loss
        self.metric_names = metric_names(loss)

    def prepare_loss(self, model: nn.Module) -> CausalLoss:
        self.find_sharing(model)
        self.prepared = self.answers = AnswerTokensLoss(model, self.rl)
        if not self.rl.beta:
            self.answers.reference = {}
        return self.prepared

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the arrays of a micro-batch of answers, or of a batch of prompts."""
        return batch.arrays(self.token_arrays) if isinstance(batch, RolloutBatch) else super().arrays(batch)

    def token_log_probs(
        self, session: Any, batches: Sequence[RolloutBatch], *, reference: bool
    ) -> list[Array]:
        """Return the log probabilities of the tokens of each batch, under the model or its reference."""
        compute = self.answers.of_reference_tokens if reference else self.answers.of_tokens
        found = session.map_batches(batches, compute)
        counts = [len(batch.of_tokens["sampler"]) for batch in batches]
        return [vector[:count] for vector, count in zip(found, counts, strict=True)]


class AnswerTokensLoss(ReferenceLoss):
    """The loss of generated answers."""

    def __init__(self, model: nn.Module, loss: RlLoss) -> None:
        super().__init__(model)
        self.rl = loss

    def of_tokens(self, arrays: Arrays) -> mx.array:
        return self._log_probs(arrays, self.trained_weights())

    def of_reference_tokens(self, arrays: Arrays) -> mx.array:
        with self.other_weights(self.reference, self.trained_weights()):
            return mx.stop_gradient(self._log_probs(arrays, self.reference))

    def _log_probs(self, arrays: Arrays, weights: Weights) -> mx.array:
        return self.token_log_probs(arrays, weights, temperature=self.rl.temperature)[0]

    def sums(self, arrays: Arrays, weights: Weights) -> tuple[mx.array, MetricSums]:
        log_probs, entropies = self.token_log_probs(arrays, weights, temperature=self.rl.temperature)
        total, sums = loss_and_metrics(
            self.rl,
            array_functions,
            arrays,
            log_probs=log_probs,
            entropies=entropies,
            answers=arrays["answers"],
            counted=arrays["counted"],
        )
        return total, detached(sums)
