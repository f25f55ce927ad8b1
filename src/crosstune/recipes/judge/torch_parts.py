"""Train and ask a judge with torch: score tokens with divided targets, and their probabilities after shared prefixes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from crosstune.core.out_of_memory import EVALUATING
from crosstune.core.protocols import Array
from crosstune.data.token_batch import IGNORED
from crosstune.recipes.judge.examples import JudgeBatch
from crosstune.recipes.judge.torch_parts_scalar import ScalarHead, scalar_scores
from crosstune.torch_engine.cross_entropy import cross_entropy_sum
from crosstune.torch_engine.device import evaluating, memory_errors
from crosstune.torch_engine.task import MetricSums, Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM, ModelInput, takes_logits_to_keep

__all__ = ["ScalarHead", "ScoreTokens", "next_log_probs", "read_prefix", "scalar_scores"]


class ScoreTokens(CausalLM):
    """A language model whose targets may be divided between two tokens."""

    eval_metric_names = ()

    def arrays(self, batch: JudgeBatch) -> Mapping[str, Array]:  # type: ignore[override]
        arrays = dict(super().arrays(batch))
        if not batch.shares.any():
            return arrays
        supervised = batch.targets != IGNORED
        return arrays | {
            "others": batch.others[supervised].astype("int64"),
            "shares": batch.shares[supervised],
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the cross entropy to the divided targets, summed over the supervised tokens.

        To give a share s to another token adds s times the difference of the two logits to the loss of the first alone.
        """
        targets = tensors["targets"]
        logits = self.supervised_logits(model, ModelInput.of(tensors))
        loss = cross_entropy_sum(logits, targets)
        if "others" not in tensors:
            return loss, {}
        others, shares = tensors["others"], tensors["shares"]
        [soft] = shares.nonzero(as_tuple=True)
        rows = logits[soft].float()
        first, second = (rows.gather(1, ids[soft][:, None])[:, 0] for ids in (targets, others))
        return loss + (shares[soft] * (first - second)).sum(), {}

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        return self.loss(model, tensors)


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The keys and values of tokens that several prompts begin with."""

    cache: DynamicCache
    length: int

    def repeated(self, count: int) -> DynamicCache:
        cache = copy.deepcopy(self.cache)
        cache.batch_repeat_interleave(count)
        return cache


def read_prefix(session: Any, tokens: Sequence[int]) -> Prefix | None:
    """Compute the keys and values of a prefix; None for a model whose cache holds something else."""
    with asking(session):
        ids = torch.tensor([list(tokens)], device=session.device)
        cache = session.model(input_ids=ids, use_cache=True, **_keep(session.model, 1)).past_key_values
    layers = getattr(cache, "layers", ())
    if (
        type(cache) is not DynamicCache
        or not layers
        or any(type(layer) is not DynamicLayer for layer in layers)
    ):
        return None
    return Prefix(cache=cache, length=len(tokens))


def next_log_probs(
    session: Any,
    rows: Sequence[Sequence[int]],
    *,
    token_ids: Sequence[int],
    last: int,
    prefix: Prefix | None = None,
) -> NDArray[np.float64]:
    """Return the log probabilities of some tokens after each of the `last` positions of each row.

    Rows are padded on the left, so that their last positions are the last columns.
    """
    width, start = max(map(len, rows)), prefix.length if prefix is not None else 0
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), start + width), dtype=np.int64)
    mask[:, :start] = 1
    for number, row in enumerate(rows):
        ids[number, width - len(row) :] = row
        mask[number, start + width - len(row) :] = 1
    positions = (mask.cumsum(axis=1) - 1).clip(min=0)[:, start:]
    options: dict[str, Any] = {"position_ids": torch.from_numpy(positions).to(session.device)}
    if not mask.all():
        options["attention_mask"] = torch.from_numpy(mask).to(session.device)
    with asking(session):
        if prefix is not None:
            options["past_key_values"] = prefix.repeated(len(rows))
        found = session.model(
            input_ids=torch.from_numpy(ids).to(session.device),
            use_cache=prefix is not None,
            **options,
            **_keep(session.model, last),
        ).logits[:, -last:]
        chosen = torch.tensor(list(token_ids), device=session.device)
        log_probs = torch.log_softmax(found.float(), dim=-1).index_select(-1, chosen)
    result: NDArray[np.float64] = log_probs.double().cpu().numpy()
    return result


def _keep(model: nn.Module, last: int) -> dict[str, Any]:
    return {"logits_to_keep": last} if takes_logits_to_keep(model) else {}


@contextlib.contextmanager
def asking(session: Any) -> Iterator[None]:
    """Run the model without gradients and dropout, in the precision of the session."""
    with (
        evaluating(session.model),
        memory_errors(session.device, doing=EVALUATING),
        torch.inference_mode(),
        session.precision.context(session.device),
    ):
        yield
