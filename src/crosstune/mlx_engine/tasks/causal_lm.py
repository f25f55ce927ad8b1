"""Train causal language models on MLX from a model folder with next-token cross entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.protocols import Array
from crosstune.data.batches.token_batch import IGNORED, TokenBatch, number_answers
from crosstune.mlx_engine.causal_loss import CausalLoss
from crosstune.mlx_engine.load import check_stored, load_model
from crosstune.mlx_engine.save_model import save_model
from crosstune.mlx_engine.task import Arrays, BuildContext, MetricSums
from crosstune.models.identity import identity

SMALLEST_MULTIPLE = 32


class CausalLM:
    """The task of `sft`, and of every recipe that trains a language model on tokens."""

    metric_names: Sequence[str] = ()
    eval_metric_names: Sequence[str] = ("exact_match",)

    def __init__(self) -> None:
        self.opening: BuildContext | None = None
        self._loss: CausalLoss | None = None

    def build(self, opening: BuildContext) -> nn.Module:
        """Load the model folder, quantized as the plan says."""
        assert opening.folder is not None, "a causal language model is built from a folder"
        self.opening = opening
        return load_model(opening.folder, plan=opening.plan, dtype=opening.dtype, trained=opening.trained)

    def arrays(self, batch: TokenBatch) -> Mapping[str, Array]:
        """Return the token ids, the supervised positions (`places`, indices into the flattened rows) and their targets.

        For a compiled step sizes are rounded up, since each new shape recompiles it. The padding is at the end and
        carries no loss (its `counted` is 0).
        """
        few_shapes = self._opened().compiled
        length = batch.input_ids.shape[1]
        width = _round_up(length) if few_shapes else length
        pad = ((0, 0), (0, width - length))
        row, column = (batch.targets != IGNORED).nonzero()
        num_places = max(1, _round_up(len(row)) if few_shapes else len(row))
        places = np.zeros(num_places, dtype=np.int32)
        places[: len(row)] = row * width + column
        arrays: dict[str, Array] = {
            "input_ids": np.pad(batch.input_ids, pad),
            "places": places,
            "targets": self.at_places(batch.targets, batch, num_places),
            "answers": np.pad(number_answers(batch), (0, num_places - len(row))).astype(np.int32),
            "counted": (np.arange(num_places) < len(row)).astype(np.float32),
        }
        return arrays | ({"segments": np.pad(batch.segments, pad)} if batch.is_packed else {})

    def at_places(self, values: Array, batch: TokenBatch, num_places: int) -> Array:
        """Return the values at the supervised positions, filled up with zeros."""
        found = np.zeros(num_places, dtype=values.dtype)
        chosen = values[batch.targets != IGNORED]
        found[: len(chosen)] = chosen
        return found

    @property
    def prepared(self) -> CausalLoss:
        assert self._loss is not None, "the loss is not prepared yet"
        return self._loss

    def prepare_loss(self, model: nn.Module) -> CausalLoss:
        self._loss = CausalLoss(model)
        return self._loss

    def loss(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        assert self._loss is not None and self._loss.model is model, "the loss is prepared for another model"
        return self._loss(arrays)

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.prepared.evaluate(arrays)

    def check_batch(self, arrays: Mapping[str, Any]) -> None:
        """Raise if rows are packed and the model does not separate documents."""
        if "segments" in arrays:
            assert self._loss is not None
            self._loss.ensure_separates_documents()

    def check_weights(self, model: nn.Module, trained: Mapping[str, Any]) -> None:
        folder = self._opened().folder
        assert folder is not None
        check_stored(folder, trained, kind=str(getattr(model, "model_type", "?")))

    def base_record(self) -> dict[str, Any]:
        """Return a record of the base weights, their quantization and the precision of the training."""
        opening = self._opened()
        plan = opening.plan
        assert opening.folder is not None
        spec = plan.quant_spec
        return {
            "base": {"name": plan.config.model_name, "identity": identity(opening.folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": plan.precision,
        }

    def write_model(self, model: nn.Module, folder: Path) -> None:
        """Write a model folder that transformers and mlx-lm can load."""
        base = self._opened().folder
        assert base is not None
        save_model(folder, model, base=base)

    def _opened(self) -> BuildContext:
        assert self.opening is not None, "the model is not built yet"
        return self.opening


def _round_up(number: int) -> int:
    """Round up to one of eight sizes between powers of two, which adds an eighth at most."""
    multiple = max(SMALLEST_MULTIPLE, 1 << max(0, (number - 1).bit_length() - 4))
    return -(-number // multiple) * multiple
