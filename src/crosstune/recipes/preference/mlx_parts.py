"""Train on preferences with MLX: log probabilities of answers under the model and under the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.protocols import Array
from crosstune.data.batches.forked import ForkedBatch, separate_rows, split_forks
from crosstune.data.batches.token_batch import TokenBatch
from crosstune.mlx_engine import array_functions
from crosstune.mlx_engine.forks import can_share_prompts, run_branches
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLM, CausalLoss
from crosstune.mlx_engine.tasks.token_losses import TokenLoss, Weights
from crosstune.recipes.preference.losses import PreferenceLoss, loss_and_metrics, metric_names
from crosstune.recipes.preference.open_pairs import OTHER, PreferenceBatch


class ForkedLM(CausalLM):
    """A language model that computes a prompt once for all of its answers."""

    _shares_prompts = False

    def find_sharing(self, model: nn.Module) -> None:
        """Test whether the model can share prompts."""
        # A layer that is recomputed in the backward pass does not fill a cache.
        recomputes = self.opening.plan.config.use_gradient_checkpointing
        self._shares_prompts = not recomputes and can_share_prompts(model)

    def token_arrays(self, tokens: TokenBatch) -> Mapping[str, Array]:
        if not isinstance(tokens, ForkedBatch):
            return super().arrays(tokens)
        # Packed prompts would be padded to the longest: packed documents cost less.
        if (
            tokens.is_packed
            or not self._shares_prompts
            or not (tokens.branches[tokens.segments > 0] == 0).any()
        ):
            return super().arrays(separate_rows(tokens))
        split = split_forks(tokens)
        answers = TokenBatch(
            input_ids=split.branches,
            targets=split.targets,
            segments=np.ones_like(split.branches),
            positions=np.zeros_like(split.branches),
        )
        return {
            **super().arrays(answers),
            "prompts": split.prompts,
            "prompt_lengths": split.prompt_lengths,
            "fork_of": split.fork_of,
        }


class PreferenceLM(ForkedLM):
    """A language model with a loss over the log probabilities of whole answers."""

    def __init__(self, loss: PreferenceLoss) -> None:
        self.preference = loss
        self.metric_names = self.eval_metric_names = metric_names(loss)

    def prepare_loss(self, model: nn.Module) -> CausalLoss:
        self.find_sharing(model)
        self.prepared = self.answers = AnswerLoss(model, self.preference)
        return self.prepared

    def forget_reference(self) -> None:
        """Free the initial weights, once all log probabilities of the reference are known."""
        self.answers.reference = {}

    def arrays(self, batch: PreferenceBatch) -> Mapping[str, Array]:  # type: ignore[override]
        return batch.arrays(self.token_arrays)

    def answer_log_probs(self, session: Any, batches: Iterable[PreferenceBatch]) -> list[Array]:
        """Return the log probabilities of the answers of each batch; for single answers, the other answers after them."""
        return session.map_batches(batches, self.answers.answer_log_probs)


class ReferenceLoss(TokenLoss):
    """A loss from the log probabilities of tokens; its reference is the model with its initial weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reference = self.trained_weights()

    def token_log_probs(
        self, feed: Arrays, weights: Weights, *, temperature: float = 1.0
    ) -> tuple[mx.array, mx.array]:
        """Return the log probability of each supervised token, and the entropy without a gradient."""

        def measure(logits: mx.array, chunk: slice) -> tuple[mx.array, mx.array]:
            log_probs = nn.log_softmax(logits / temperature, axis=-1)
            entropy = -(mx.exp(log_probs) * log_probs).sum(axis=-1)
            return mx.take_along_axis(log_probs, feed["targets"][chunk][:, None], axis=-1)[:, 0], entropy

        return self.measure(self._answers_hidden(feed), weights, measure)

    def _answers_hidden(self, feed: Arrays) -> mx.array:
        """Return the hidden states, or for a model that cannot be split the logits, of the supervised tokens."""

        def run(ids: mx.array, **options: Any) -> mx.array:
            if self._split is not None:
                return self._split.hidden(ids, **options)
            logits = self.model(ids, **options)
            return logits.reshape(-1, logits.shape[-1])

        if "prompts" not in feed:
            return run(feed["input_ids"], **self._caches(feed))[feed["places"]]
        found = run_branches(
            run,
            self.model,
            prompts=feed["prompts"],
            prompt_lengths=feed["prompt_lengths"],
            branches=feed["input_ids"],
            fork_of=feed["fork_of"],
        )
        return found[feed["places"]]


class AnswerLoss(ReferenceLoss):
    """The preference loss of a model."""

    def __init__(self, model: nn.Module, preference: PreferenceLoss) -> None:
        super().__init__(model)
        self.preference = preference

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self(arrays)

    def sums(self, arrays: Arrays, weights: Weights) -> tuple[mx.array, MetricSums]:
        reference = arrays.get("reference")
        if reference is None and self.preference.needs_reference:
            reference = self._of_reference(arrays, weights)
        log_probs, entropy = self._log_probs(arrays, weights)
        if reference is None:
            reference = mx.zeros_like(log_probs)
        total, sums = loss_and_metrics(
            self.preference,
            array_functions,
            arrays,
            log_probs=log_probs,
            reference=reference,
            entropy=entropy,
            kl=self._estimate_kl(arrays, weights) if "labels" in arrays else None,
        )
        return total, detached(sums)

    def answer_log_probs(self, arrays: Arrays) -> mx.array:
        weights = self.trained_weights()
        found = [self._log_probs(arrays, weights)[0]]
        if f"{OTHER}input_ids" in arrays:
            found.append(self._log_probs(arrays, weights, prefix=OTHER)[0])
        return mx.concatenate(found)

    def _estimate_kl(self, arrays: Arrays, weights: Weights) -> mx.array:
        """Return the mean log ratio of answers to other prompts, at least 0."""
        found = mx.stop_gradient(self._log_probs(arrays, weights, prefix=OTHER)[0])
        reference = arrays.get("other_reference")
        if reference is None:
            reference = self._of_reference(arrays, weights, prefix=OTHER)
        return mx.maximum((found - reference).mean(), 0)

    def _log_probs(
        self, arrays: Arrays, weights: Weights, *, prefix: str = ""
    ) -> tuple[mx.array, tuple[mx.array, mx.array]]:
        """Return the log probability of each answer, and the entropy summed over tokens with their number."""
        feed = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        found, entropies = self.token_log_probs(feed, weights)
        counted = feed["counted"]
        total = mx.zeros(arrays["lengths"].shape).at[feed["answers"]].add(found * counted)
        return total, ((entropies * counted).sum(), counted.sum())

    def _of_reference(self, arrays: Arrays, weights: Weights, *, prefix: str = "") -> mx.array:
        with self.other_weights(self.reference, weights):
            return mx.stop_gradient(self._log_probs(arrays, self.reference, prefix=prefix)[0])


def detached(sums: Mapping[str, tuple[Any, Any]]) -> MetricSums:
    def cut(value: Any) -> Any:
        return mx.stop_gradient(value) if isinstance(value, mx.array) else value

    return {name: (cut(total), cut(weight)) for name, (total, weight) in sums.items()}
