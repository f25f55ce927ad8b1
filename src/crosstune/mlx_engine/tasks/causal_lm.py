"""Train a causal language model on next-token cross entropy, summed over supervised tokens, with the logits in chunks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.data.batches.token_batch import CHANNEL, FIRST, IGNORED, SECOND, TokenBatch, number_answers
from crosstune.mlx_engine.load import check_stored, load_model
from crosstune.mlx_engine.optimizer import put
from crosstune.mlx_engine.save_model import save_model
from crosstune.mlx_engine.split_head import TRIAL_ERRORS, find_head_weights, split_model
from crosstune.mlx_engine.task import Arrays, BuildContext, Loss, MetricSums
from crosstune.mlx_engine.wrap_call import wrap_call
from crosstune.models.identity import base_record

LOGITS_AT_A_TIME, PLACES_AT_LEAST = 2**24, 512
"""Logits per chunk at most, and positions per chunk at least: smaller chunks would leave a GPU idle."""
PLACE_ARRAYS = ("targets", "counted", "others", "shares")
"""Arrays with a value for each supervised position. The last two are optional: a second target and its fraction."""
_ROUNDING = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1e-1}
"""Largest difference between two ways to compute the same logits, relative to the largest logit."""


class CausalLoss(Loss):
    """Cross entropy in fp32, summed over the supervised tokens of a batch.

    Rows are padded on the right and attention is causal, so no token attends to padding. If the model can be split
    before its head, only supervised positions reach the head, one chunk at a time; otherwise all positions do.
    """

    def __init__(self, model: nn.Module, *, places_at_a_time: int | None = None) -> None:
        self.model = model
        self.places_at_a_time = places_at_a_time
        self._split = split_model(model)
        self._head_weights = find_head_weights(self._split) if self._split is not None else []
        self._separates = False

    def __call__(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        return self._measure(arrays)[0], {}

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        """Return the loss without noise, and the fraction of answers whose supervised tokens all have the largest logit."""
        return self._measure({name: array for name, array in arrays.items() if name not in NOISE})

    def _measure(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        total, is_wrong = mx.array(0.0), list[mx.array]()
        hidden = self._hidden(arrays) if self._split is not None else None
        for chunk in self._chunks(hidden):
            if hidden is None or self._split is None:
                logits, feed = self._all_logits(arrays), _of_places(arrays)
            else:
                logits = self._split.logits(mx.depends(hidden[chunk], [total, *is_wrong[-1:]]))
                feed = {name: array[chunk] for name, array in _of_places(arrays).items()}
            is_wrong.append((mx.argmax(logits, axis=-1) != feed["targets"]) * feed["counted"])
            total = total + _cross_entropy(logits, feed)
        answers = arrays["answers"]
        num_answers = (answers.max() + 1) * (arrays["counted"].sum() > 0)
        errors = mx.zeros(answers.shape).at[answers].add(mx.concatenate(is_wrong))
        return total, {"exact_match": (num_answers - (errors > 0).sum(), num_answers)}

    def _chunks(self, hidden: mx.array | None) -> Iterator[slice]:
        """Yield slices of the supervised positions, as few and equal as memory allows; one for an unsplit model."""
        if hidden is None or self._split is None:
            yield slice(None)
            return
        most = self.places_at_a_time
        if most is None:
            most = max(LOGITS_AT_A_TIME // self._split.logits(hidden[:1]).shape[-1], PLACES_AT_LEAST)
        size = -(-hidden.shape[0] // -(-hidden.shape[0] // most))
        for start in range(0, hidden.shape[0], size):
            yield slice(start, start + size)

    def scaled(
        self, arrays: Arrays, weights: Mapping[str, mx.array], scale: mx.array
    ) -> tuple[mx.array, MetricSums]:
        """Return the loss times `scale`, differentiable with respect to `weights` of the model.

        Each chunk of logits is freed after its part of the loss and the gradient: all logits together would be the largest
        array of a step. The head's gradient is computed with the loss and returned in the backward pass.
        """
        feed = {**arrays, "counted": arrays["counted"] * scale}
        if self._split is None:
            return _cross_entropy(self._all_logits(feed), _of_places(feed)), {}

        @mx.custom_function
        def total(hidden: mx.array, head: dict[str, mx.array]) -> Any:
            return self._chunked_loss(hidden, head, feed)

        @total.vjp
        def total_vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
            def scaled(gradient: mx.array) -> mx.array:
                return gradient * cotangents[0].astype(gradient.dtype)

            return scaled(outputs[1]), {name: scaled(array) for name, array in outputs[2].items()}

        head = {name: weights[name] for name in self._head_weights}
        found: Any = total(self._hidden(feed), head)
        return found[0], {}

    def _hidden(self, feed: Arrays) -> mx.array:
        assert self._split is not None
        with noisy_embeddings(self.model, feed):
            return self._split.hidden(feed["input_ids"], **self._caches(feed))[feed["places"]]

    def _all_logits(self, feed: Arrays) -> mx.array:
        with noisy_embeddings(self.model, feed):
            return self.logits_at(feed["input_ids"], feed["places"], **self._caches(feed))

    def logits_at(self, ids: mx.array, places: mx.array, **kwargs: Any) -> mx.array:
        """Return the logits at some positions, indices into the flattened rows; if possible, compute no others."""
        if self._split is None:
            logits = self.model(ids, **kwargs)
            return logits.reshape(-1, logits.shape[-1])[places]
        return self._split.logits(self._split.hidden(ids, **kwargs)[places])

    def _chunked_loss(
        self, hidden: mx.array, weights: dict[str, mx.array], feed: Arrays
    ) -> tuple[mx.array, mx.array, dict[str, mx.array]]:
        """Return the loss, and its gradients with respect to the hidden states and the trained weights of the head."""
        split = self._split
        assert split is not None

        def loss_of(inputs: tuple[mx.array, dict[str, mx.array]], of_places: dict[str, mx.array]) -> Any:
            put(self.model, inputs[1])
            return _cross_entropy(split.logits(inputs[0]), of_places)

        compute: Any = mx.value_and_grad(loss_of)
        total, by_hidden, by_weight = mx.array(0.0), list[mx.array](), dict[str, mx.array]()
        for chunk in self._chunks(hidden):
            # Wait for the chunk before, so that only one chunk of logits is in memory.
            chunk_hidden = mx.depends(hidden[chunk], [total, *by_hidden[-1:], *by_weight.values()])
            of_chunk = {name: array[chunk] for name, array in _of_places(feed).items()}
            found, (hidden_gradient, weight_gradients) = compute((chunk_hidden, weights), of_chunk)
            by_hidden.append(hidden_gradient)
            for name, array in weight_gradients.items():
                array = array.astype(mx.float32)
                by_weight[name] = by_weight[name] + array if name in by_weight else array
            total = total + found
        put(self.model, weights)
        by_weight = {name: array.astype(weights[name].dtype) for name, array in by_weight.items()}
        return total, mx.concatenate(by_hidden), by_weight

    def _caches(self, feed: Arrays) -> dict[str, Any]:
        if "segments" not in feed:
            return {}
        return {"cache": document_caches(self.model, feed["segments"])}

    def ensure_separates_documents(self) -> None:
        """Raise unless a document in a packed row has the same logits as alone, tested once per model: a model without a
        mask or with absolute positions would mix documents."""
        if self._separates:
            return
        # Different boundaries in each row, to detect a mask applied to the wrong row or head.
        starts, width = (3, 5, 8, 9, 11), 16
        rows = mx.arange(1, len(starts) * width + 1).reshape(len(starts), width)
        segments = mx.array([[1] * start + [2] * (width - start) for start in starts])
        try:
            logits = self.model(rows, cache=document_caches(self.model, segments))
            alone = [self.model(rows[row : row + 1, start:])[0] for row, start in enumerate(starts)]
            mx.eval(logits, alone)
        except TRIAL_ERRORS as error:
            raise self._cannot_pack(
                f"mlx-lm's code for it does not accept a document mask ({error})."
            ) from error
        for row, start in enumerate(starts):
            size = float(mx.abs(alone[row]).max())
            if float(mx.abs(logits[row, start:] - alone[row]).max()) > _ROUNDING[logits.dtype] * size:
                raise self._cannot_pack("a document's logits change when another document precedes it.")
        self._separates = True

    def _cannot_pack(self, why: str) -> UserError:
        kind = getattr(self.model, "model_type", type(self.model).__name__)
        return UserError(
            f"--packing cannot be used with a {kind} model on MLX.", why=why, do="remove --packing"
        )


class DocumentMask:
    """A cache that stores nothing and only provides the mask of packed rows.

    Positions continue through a row. Rotary embeddings depend only on relative positions, so documents are unaffected.
    """

    offset = 0

    def __init__(self, segments: mx.array) -> None:
        self.segments = segments
        self.masks: dict[int | None, mx.array] = {}

    def make_mask(
        self, num_tokens: int, return_array: bool = True, window_size: int | None = None
    ) -> mx.array:
        if window_size not in self.masks:
            position = mx.arange(num_tokens)
            visible = position[:, None] >= position[None]
            if window_size is not None:
                visible = visible & (position[:, None] < position[None] + window_size)
            same_document = self.segments[:, :, None] == self.segments[:, None, :]
            self.masks[window_size] = (same_document & visible)[:, None]
        return self.masks[window_size]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


def document_caches(model: Any, segments: mx.array) -> list[DocumentMask]:
    return [DocumentMask(segments)] * len(model.layers)


def _of_places(feed: Arrays) -> dict[str, mx.array]:
    return {name: feed[name] for name in PLACE_ARRAYS if name in feed}


def _cross_entropy(logits: mx.array, of_places: Mapping[str, mx.array]) -> mx.array:
    logits = logits.astype(mx.float32)
    picked = mx.take_along_axis(logits, of_places["targets"][:, None], axis=-1)[:, 0]
    if "others" in of_places:
        other = mx.take_along_axis(logits, of_places["others"][:, None], axis=-1)[:, 0]
        picked = picked + of_places["shares"] * (other - picked)
    return ((mx.logsumexp(logits, axis=-1) - picked) * of_places["counted"]).sum()


NOISE = ("noise_keys", "noise_scales")


@contextlib.contextmanager
def noisy_embeddings(model: Any, arrays: Mapping[str, mx.array]) -> Iterator[None]:
    """Add noise to the first layer's input, which some models scale first; do nothing without keys."""
    if NOISE[0] not in arrays:
        yield
        return
    keys, scales = (arrays[name] for name in NOISE)

    def add(call: Callable[..., Any], layer: Any, hidden: mx.array, *args: Any, **kwargs: Any) -> Any:
        return call(hidden + noise(keys, scales, hidden.shape[-1]).astype(hidden.dtype), *args, **kwargs)

    undo = wrap_call(model.layers[0], add)
    try:
        yield
    finally:
        undo()


def noise(keys: mx.array, scales: mx.array, channels: int) -> mx.array:
    """Return noise in fp32 for uint32 keys and fp32 scales, with `channels` numbers for each."""
    hashed = keys[..., None] + mx.arange(channels, dtype=mx.uint32) * mx.array(CHANNEL, mx.uint32)
    hashed = (hashed ^ (hashed >> 16)) * mx.array(FIRST, mx.uint32)
    hashed = (hashed ^ (hashed >> 13)) * mx.array(SECOND, mx.uint32)
    hashed = hashed ^ (hashed >> 16)
    uniform = (hashed >> 8).astype(mx.float32) * 2.0**-23 - 1.0
    return uniform * (scales / math.sqrt(channels))[..., None]


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
        return base_record(self._folder, self.opening.plan)

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
