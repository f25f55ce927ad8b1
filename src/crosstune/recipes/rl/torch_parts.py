"""Reinforcement learning with torch: the loss of generated answers, and their log probabilities before a step."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from crosstune.core.protocols import Array
from crosstune.recipes.preference.torch_parts import ReferenceLM
from crosstune.recipes.rl.losses import RlLoss, loss_and_metrics, metric_names
from crosstune.recipes.rl.rollouts import RolloutBatch
from crosstune.torch_engine import array_functions
from crosstune.torch_engine.task import MetricSums, Tensors
from crosstune.torch_engine.tasks.model_input import ModelInput


class RlLM(ReferenceLM):
    """A language model with a loss over the log probabilities of its own answers."""

    def __init__(self, loss: RlLoss) -> None:
        super().__init__()
        self.rl = loss
        self.metric_names = metric_names(loss)

    def keep_reference(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        super().keep_reference(model, trained)
        if not self.rl.beta:
            self.forget_reference()

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the arrays of a micro-batch of answers, or of a batch of prompts."""
        return batch.arrays(super().arrays) if isinstance(batch, RolloutBatch) else super().arrays(batch)

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        given = ModelInput.of(tensors)
        losses, entropies = self.token_losses(model, given, temperature=self.rl.temperature)
        return loss_and_metrics(
            self.rl,
            array_functions,
            tensors,
            log_probs=-losses,
            entropies=entropies,
            answers=given.answers,
            counted=torch.ones_like(losses),
        )

    def token_log_probs(
        self, session: Any, batches: Sequence[RolloutBatch], *, reference: bool
    ) -> list[Array]:
        """Return the log probabilities of the tokens of each batch, under the model or its reference."""

        def compute(model: nn.Module, tensors: Tensors) -> torch.Tensor:
            with self.as_reference(model) if reference else contextlib.nullcontext():
                losses, _ = self.token_losses(model, ModelInput.of(tensors), temperature=self.rl.temperature)
            return -losses

        return session.map_batches(batches, compute)
