"""Train on preferences with torch: log probabilities of answers under the model and under the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from crosstune.core.protocols import Array
from crosstune.recipes.preference.losses import PreferenceLoss, loss_and_metrics, metric_names
from crosstune.recipes.preference.open_pairs import OTHER, PreferenceBatch
from crosstune.torch_engine import array_functions
from crosstune.torch_engine.task import FirstWeights, MetricSums, Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM, can_share_prompts
from crosstune.torch_engine.tasks.model_input import ModelInput


class ReferenceLM(CausalLM):
    """A language model that can turn into its reference: the model with its initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self._reference: FirstWeights | None = None

    def keep_reference(self, model: nn.Module, trained: Mapping[str, torch.nn.Parameter]) -> None:
        """Keep the initial weights, with which the model is the reference."""
        self._reference = FirstWeights(trained)
        if self.decoder is None:
            self.shares_prompts = can_share_prompts(model, device=self.context.device)

    def forget_reference(self) -> None:
        """Free the initial weights, once all log probabilities of the reference are known."""
        self._reference = None

    def as_reference(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Turn the model into the reference in the `with` block, without gradients and dropout."""
        assert self._reference is not None, "the initial weights are kept"
        return self._reference.restored(model)


class PreferenceLM(ReferenceLM):
    """A language model with a loss over the log probabilities of whole answers."""

    def __init__(self, loss: PreferenceLoss) -> None:
        super().__init__()
        self.preference = loss
        self.metric_names = self.eval_metric_names = metric_names(loss)

    def arrays(self, batch: PreferenceBatch) -> Mapping[str, Array]:  # type: ignore[override]
        return batch.arrays(super().arrays)

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the loss, summed over the pairs or single answers."""
        reference = tensors.get("reference")
        kl = self._estimate_kl(model, tensors) if "labels" in tensors else None
        if reference is None and self.preference.needs_reference:
            with self.as_reference(model):
                reference = self._log_probs(model, tensors)[0]
        log_probs, entropy = self._log_probs(model, tensors)
        if reference is None:
            reference = torch.zeros_like(log_probs)
        return loss_and_metrics(
            self.preference,
            array_functions,
            tensors,
            log_probs=log_probs,
            reference=reference,
            entropy=entropy,
            kl=kl,
        )

    def answer_log_probs(self, session: Any, batches: Iterable[PreferenceBatch]) -> list[Array]:
        """Return the log probabilities of the answers of each batch; for single answers, the other answers after them."""

        def compute(model: nn.Module, tensors: Tensors) -> torch.Tensor:
            found = [self._log_probs(model, tensors)[0]]
            if f"{OTHER}input_ids" in tensors:
                found.append(self._log_probs(model, tensors, prefix=OTHER)[0])
            return torch.cat(found)

        return session.map_batches(batches, compute)

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        return self.loss(model, tensors)

    def _log_probs(
        self, model: nn.Module, tensors: Tensors, *, prefix: str = ""
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, int]]:
        """Return the log probability of each answer, and the entropy summed over tokens with their number."""
        given = ModelInput.of(
            {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        )
        losses, entropies = self.token_losses(model, given)
        total = losses.new_zeros(len(tensors["lengths"])).index_add(0, given.answers, losses)
        return -total, (entropies.detach().sum(), len(entropies))

    @torch.no_grad()
    def _estimate_kl(self, model: nn.Module, tensors: Tensors) -> torch.Tensor:
        """Return the mean log ratio of answers to other prompts, at least 0."""
        found = self._log_probs(model, tensors, prefix=OTHER)[0]
        reference = tensors.get("other_reference")
        if reference is None:
            with self.as_reference(model):
                reference = self._log_probs(model, tensors, prefix=OTHER)[0]
        return (found - reference).mean().clamp(min=0)
