"""Distill with MLX: the divergence of a language model from its teacher, with the logits of both in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from crosstune.core.out_of_memory import LOADING
from crosstune.core.protocols import Array
from crosstune.mlx_engine import array_functions
from crosstune.mlx_engine.device import memory_errors
from crosstune.mlx_engine.load import DTYPES, load_model
from crosstune.mlx_engine.task import Arrays, MetricSums
from crosstune.mlx_engine.tasks.causal_lm import CausalLM, CausalLoss
from crosstune.mlx_engine.tasks.token_losses import TokenLoss, Weights
from crosstune.recipes.distill.losses import (
    METRICS,
    Objective,
    TeacherRows,
    measure,
    metric_sums,
    pack_rows,
    read_teacher,
    unpack_rows,
)
from crosstune.recipes.distill.recipe import DistillBatch
from crosstune.recipes.distill.teacher import Teacher


class DistillLM(CausalLM):
    """A language model with the divergence from a teacher as its loss."""

    metric_names = METRICS
    eval_metric_names = (*METRICS, "exact_match")

    def __init__(self, objective: Objective, teacher: Teacher) -> None:
        self.objective, self.teacher = objective, teacher

    def prepare_loss(self, model: nn.Module) -> CausalLoss:
        first = self.teacher.is_base(self.opening.plan)
        self.prepared = self._loss = DistillLoss(model, self.objective, keeps_first=first)
        return self.prepared

    def arrays(self, batch: DistillBatch) -> Mapping[str, Array]:  # type: ignore[override]
        arrays, own = dict(super().arrays(batch.tokens)), batch.own_arrays()
        if "teacher" in own:
            padding = len(arrays["targets"]) - len(own["teacher"])
            own["teacher"] = np.pad(own["teacher"], ((0, padding), (0, 0)))
        return arrays | own

    def check_batch(self, arrays: Mapping[str, Any]) -> None:
        """Open the teacher before a step is traced; raise if it or the student cannot read packed rows."""
        super().check_batch(arrays)
        if "teacher" in arrays:
            return
        self._open()
        if "segments" in arrays and self._loss.teacher is not None:
            self._loss.teacher.ensure_separates_documents()

    def forget_teacher(self) -> None:
        """Free the teacher, once its distributions are stored."""
        self._loss.teacher = self._loss.first = None

    def teacher_rows(self, session: Any, batches: Iterable[DistillBatch]) -> list[Array]:
        """Return the packed distributions of the teacher for the supervised tokens of each batch."""
        self._open()
        weights, columns = list[int](), self.objective.num_columns

        def noted() -> Iterable[DistillBatch]:
            for batch in batches:
                weights.append(batch.weight)
                yield batch

        found = session.map_batches(noted(), self._loss.teacher_rows)
        return [
            vector.reshape(-1, columns)[:weight] for vector, weight in zip(found, weights, strict=True)
        ]  # without the padding of compiled steps

    def _open(self) -> None:
        """Open the teacher, unless it is open or is the base under the adapters."""
        if self._loss.teacher is not None or self._loss.first is not None:
            return
        with memory_errors(doing=LOADING), self.teacher.opening():
            plan = self.teacher.plan(self.opening.plan)
            model = load_model(self.teacher.folder, plan=plan, dtype=DTYPES[plan.precision], trained=False)
            model.freeze()
            model.eval()
            self._loss.teacher = CausalLoss(model)


class DistillLoss(TokenLoss):
    """The loss of the student. Its teacher is another model, or the student with its `first` weights."""

    def __init__(self, model: nn.Module, objective: Objective, *, keeps_first: bool) -> None:
        super().__init__(model)
        self.objective = objective
        self.teacher: CausalLoss | None = None
        self.first = self.trained_weights() if keeps_first else None

    def sums(self, arrays: Arrays, weights: Weights) -> tuple[mx.array, MetricSums]:
        losses, values = self._rows(arrays, weights)
        return (losses * arrays["counted"]).sum(), metric_sums(values, arrays["counted"])

    def evaluate(self, arrays: Arrays) -> tuple[mx.array, MetricSums]:
        losses, values = self._rows(arrays, self.trained_weights())
        counted, answers = arrays["counted"], arrays["answers"]
        num_answers = (answers.max() + 1) * (counted.sum() > 0)
        errors = mx.zeros(answers.shape).at[answers].add(values[:, len(METRICS)] * counted)
        exact = (num_answers - (errors > 0).sum(), num_answers)
        return (losses * counted).sum(), {**metric_sums(values, counted), "exact_match": exact}

    def teacher_rows(self, arrays: Arrays) -> mx.array:
        """Return the packed distributions of the supervised tokens, a chunk at a time."""
        read, found = self._reader(arrays, self.trained_weights()), list[mx.array]()
        hidden = self._hidden(arrays) if self._split is not None else None
        for chunk in self._chunks(hidden):
            found.append(pack_rows(read(chunk), array_functions))
            mx.eval(found[-1])
        return mx.concatenate(found).reshape(-1)

    def _rows(self, arrays: Arrays, weights: Weights) -> tuple[mx.array, mx.array]:
        """Return the loss and the metrics of each supervised token."""
        read = self._reader(arrays, weights)

        def measured(logits: mx.array, chunk: slice) -> tuple[mx.array, mx.array]:
            targets, weight = arrays["targets"][chunk], arrays["ce_weight"]
            return measure(logits, targets, read(chunk), self.objective, array_functions, weight=weight)

        hidden = self._hidden(arrays) if self._split is not None else self._all_logits(arrays)
        return self.measure(hidden, weights, measured)

    def _reader(self, arrays: Arrays, weights: Weights) -> Callable[[slice], TeacherRows]:
        """Return a function for the teacher's distributions of some of the supervised tokens: stored, or computed."""
        stored = arrays.get("teacher")
        if stored is not None:
            return lambda chunk: unpack_rows(stored[chunk], self.objective, array_functions)
        model: CausalLoss = self
        if self.first is None:
            assert self.teacher is not None, "the teacher is open"
            model = self.teacher
        split, first = model._split, self.first
        with self.other_weights(first, weights) if first is not None else contextlib.nullcontext():
            inputs = mx.stop_gradient(
                model._hidden(arrays) if split is not None else model._all_logits(arrays)
            )

        def read(chunk: slice) -> TeacherRows:
            logits = split.logits(inputs[chunk]) if split is not None else inputs[chunk]
            logits = mx.stop_gradient(logits.astype(mx.float32))
            return read_teacher(logits, arrays["targets"][chunk], self.objective, array_functions)

        return read
