"""The task of causal language models on torch: which columns reach the head, and the loss, against numpy in float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import IGNORED, TokenBatch
from crosstune.torch_engine.tasks.causal_lm import CausalLM, ensure_separates_documents, takes_logits_to_keep

VOCABULARY = 40


class Table(nn.Module):
    """A model whose logits depend on the token and, where they are given, on its position."""

    def __init__(self, *, reach: float = 0.0, size: float = 1.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(size * torch.randn(VOCABULARY, VOCABULARY, generator=draw))
        self.reach = reach
        self.calls: list[dict[str, Any]] = []

    def compute(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        logits = self.table[input_ids]
        if position_ids is not None:
            logits = logits + 0.1 * position_ids[..., None]
            # What an attention that reaches over a border would do: every token sees the first of its row.
            logits = logits + self.reach * self.table[input_ids[:, :1]]
        return logits


class Cuts(Table):
    def forward(
        self, input_ids: Any, position_ids: Any = None, use_cache: bool = True, logits_to_keep: Any = None
    ) -> Any:
        assert not use_cache
        self.calls.append({"positions": position_ids, "columns": logits_to_keep})
        logits = self.compute(input_ids, position_ids)
        return SimpleNamespace(logits=logits if logits_to_keep is None else logits[:, logits_to_keep])


class Whole(Table):
    def forward(self, input_ids: Any, position_ids: Any = None, use_cache: bool = True) -> Any:
        assert not use_cache
        self.calls.append({"positions": position_ids})
        return SimpleNamespace(logits=self.compute(input_ids, position_ids))


def make_batch(*, packed: bool = False) -> TokenBatch:
    """Two rows of five columns: 1 and 3 are supervised in one row each, 4 in both."""
    targets = np.full((2, 5), IGNORED, np.int32)
    targets[0, 1], targets[1, 3], targets[0, 4], targets[1, 4] = 7, 0, 8, 9
    segments = np.array([[1, 1, 2, 2, 2], [1, 1, 1, 2, 2]], np.int32) if packed else np.ones((2, 5), np.int32)
    positions = np.array([[0, 1, 0, 1, 2], [0, 1, 2, 0, 1]], np.int32)
    ids = np.arange(10, dtype=np.int32).reshape(2, 5)
    return TokenBatch(input_ids=ids, targets=targets, segments=segments, positions=positions)


def expected_loss(model: Table, batch: TokenBatch, *, packed: bool) -> float:
    table = model.table.detach().double().numpy()
    total = 0.0
    for row, column in zip(*np.nonzero(batch.targets != IGNORED), strict=True):
        logits = table[batch.input_ids[row, column]]
        logits = logits + 0.1 * batch.positions[row, column] if packed else logits
        total += np.log(np.exp(logits).sum()) - logits[batch.targets[row, column]]
    return float(total)


def tensors_of(batch: TokenBatch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in CausalLM().arrays(batch).items()}


def test_only_columns_with_supervision_are_kept() -> None:
    batch = make_batch()
    arrays = CausalLM().arrays(batch)
    assert set(arrays) == {"input_ids", "columns", "targets", "answers", "places"}
    assert arrays["columns"].tolist() == [1, 3, 4]
    assert arrays["targets"].tolist() == [7, 8, 0, 9] and arrays["answers"].tolist() == [0, 0, 1, 1]
    assert arrays["places"].tolist() == [0, 2, 4, 5]
    assert arrays["input_ids"].tolist() == batch.input_ids.tolist()
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int64)}


def test_nothing_is_chosen_where_all_is_supervised() -> None:
    batch = make_batch()
    batch.targets[:] = 1
    assert set(CausalLM().arrays(batch)) == {"input_ids", "columns", "targets", "answers"}


def test_a_packed_batch_has_positions() -> None:
    batch = make_batch(packed=True)
    positions = CausalLM().arrays(batch)["positions"]
    assert positions.tolist() == batch.positions.tolist() and positions.dtype == np.int64


def test_a_batch_without_supervision_still_has_a_column_and_no_loss() -> None:
    batch = make_batch()
    batch.targets[:] = IGNORED
    tensors = tensors_of(batch)
    assert tensors["columns"].tolist() == [0] and tensors["targets"].tolist() == []
    loss, sums = CausalLM().evaluate(Cuts(), tensors)
    assert loss.item() == 0.0 and sums == {"exact_match": (0, 0)}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [Cuts, Whole])
def test_the_loss_is_the_sum_over_supervised_tokens(kind: type[Table], packed: bool) -> None:
    model, batch = kind(), make_batch(packed=packed)
    loss, metrics = CausalLM().loss(model, tensors_of(batch))
    assert float(loss) == pytest.approx(expected_loss(model, batch, packed=packed), rel=1e-5)
    assert loss.dtype == torch.float32 and metrics == {}
    call = model.calls[-1]
    assert (call["positions"] is not None) == packed
    assert kind is Whole or call["columns"].tolist() == [1, 3, 4]
    loss.backward()
    touched = {int(token) for token in model.table.grad.abs().sum(1).nonzero()}  # type: ignore[union-attr]
    assert touched == set(batch.input_ids[batch.targets != IGNORED].tolist())


def test_whether_a_model_can_cut_before_its_head() -> None:
    assert takes_logits_to_keep(Cuts()) and not takes_logits_to_keep(Whole())


def test_a_model_that_reaches_over_borders_is_refused_and_one_that_does_not_is_tried_once() -> None:
    for model in (Cuts(), Cuts(reach=1e-7), Cuts(reach=1e-5, size=100.0)):
        for _ in range(2):
            ensure_separates_documents(model, device=torch.device("cpu"))
        assert len(model.calls) == 1 and model.training
        assert model.calls[0]["positions"].tolist() == [[*range(8), *range(8)]] * 2
    reaching = Cuts(reach=1e-2)
    for _ in range(2):
        with pytest.raises(UserError, match="--packing cannot be used with Cuts"):
            ensure_separates_documents(reaching, device=torch.device("cpu"))
    assert len(reaching.calls) == 2
    with pytest.raises(UserError, match="--packing"):
        CausalLM().loss(reaching, tensors_of(make_batch(packed=True)))
