"""Train a causal language model from a model folder on next-token cross entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.protocols import Array
from crosstune.data.batches.token_batch import IGNORED, TokenBatch, number_answers
from crosstune.mlx_engine.causal_loss import NOISE, CausalLoss
from crosstune.mlx_engine.load import check_stored, load_model
from crosstune.mlx_engine.save_model import save_model
from crosstune.mlx_engine.task import Arrays, BuildContext, Loss, MetricSums
from crosstune.models.identity import identity

SMALLEST_MULTIPLE = 32


class CausalLM:
    """The task of `sft`, and of every recipe that trains a language model on tokens."""

    metric_names: Sequence[str] = ()
    eval_metric_names: Sequence[str] = ("exact_match",)
    opening: BuildContext
    prepared: CausalLoss

    def build(self, opening: BuildContext) -> nn.Module:
        """Load the model folder, quantized by the plan."""
        self.opening = opening
        return load_model(self._folder, plan=opening.plan, dtype=opening.dtype, trained=opening.trained)

    def arrays(self, batch: TokenBatch) -> Mapping[str, Array]:
        """Return the token ids, the supervised positions (`places`, indices into the flattened rows) and their targets.

        A compiled step rounds sizes up, since each new shape recompiles it. The padding has no loss: its `counted` is 0.
        """
        few_shapes = self.opening.compiled
        length = batch.input_ids.shape[1]
        width = round_up(length) if few_shapes else length
        pad = ((0, 0), (0, width - length))
        row, column = (batch.targets != IGNORED).nonzero()
        num_places = max(1, round_up(len(row)) if few_shapes else len(row))
        places = np.zeros(num_places, dtype=np.int32)
        places[: len(row)] = row * width + column
        arrays: dict[str, Array] = {
            "input_ids": np.pad(batch.input_ids, pad),
            "places": places,
            "targets": self.at_places(batch.targets, batch, num_places),
            "answers": np.pad(number_answers(batch), (0, num_places - len(row))).astype(np.int32),
            "counted": (np.arange(num_places) < len(row)).astype(np.float32),
        }
        if batch.noise_keys is not None and batch.noise_scales is not None:
            arrays |= {name: np.pad(getattr(batch, name), pad) for name in NOISE}
        return arrays | ({"segments": np.pad(batch.segments, pad)} if batch.is_packed else {})

    def at_places(self, values: Array, batch: TokenBatch, num_places: int) -> Array:
        """Return the values at the supervised positions, padded with zeros."""
        found = np.zeros(num_places, dtype=values.dtype)
        chosen = values[batch.targets != IGNORED]
        found[: len(chosen)] = chosen
        return found

    def prepare_loss(self, model: nn.Module) -> Loss:
        """Make the loss of a model with its adapters."""
        self.prepared = CausalLoss(model)
        return self.prepared

    def loss(self, model: nn.Module, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.prepared(arrays)

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self.prepared.evaluate(arrays)

    def check_batch(self, arrays: Mapping[str, Any]) -> None:
        """Raise if rows are packed and the model cannot mask attention between packed documents."""
        if "segments" in arrays:
            self.prepared.ensure_separates_documents()

    def check_weights(self, model: nn.Module, trained: Mapping[str, Any]) -> None:
        """Raise unless the trained weights match the files of the base."""
        check_stored(self._folder, trained, kind=str(getattr(model, "model_type", "?")))

    def base_record(self) -> dict[str, Any]:
        """Return the identity of the base weights, their quantization and the precision of training."""
        plan, spec = self.opening.plan, self.opening.plan.quant_spec
        return {
            "base": {"name": plan.config.model_name, "identity": identity(self._folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": plan.precision,
        }

    def write_model(self, model: nn.Module, folder: Path) -> None:
        """Write a model folder that transformers and mlx-lm can load."""
        save_model(folder, model, base=self._folder)

    @property
    def _folder(self) -> Path:
        assert self.opening.folder is not None, "a causal language model is built from a folder"
        return self.opening.folder


def round_up(number: int) -> int:
    """Round up to one of eight sizes between powers of two: at most an eighth more."""
    multiple = max(SMALLEST_MULTIPLE, 1 << max(0, (number - 1).bit_length() - 4))
    return -(-number // multiple) * multiple
