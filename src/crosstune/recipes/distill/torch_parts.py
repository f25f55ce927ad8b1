"""Distill with torch: the divergence of a language model from its teacher, with the logits of both in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from crosstune.core.out_of_memory import LOADING
from crosstune.core.protocols import Array
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
from crosstune.torch_engine import array_functions
from crosstune.torch_engine.device import PRECISIONS, memory_errors
from crosstune.torch_engine.loading.load import load_model
from crosstune.torch_engine.task import FirstWeights, MetricSums, Tensors
from crosstune.torch_engine.tasks.causal_lm import CausalLM, count_exact
from crosstune.torch_engine.tasks.model_input import ModelInput


class DistillLM(CausalLM):
    """A language model with the divergence from a teacher as its loss."""

    metric_names = METRICS
    eval_metric_names = (*METRICS, "exact_match")

    def __init__(self, objective: Objective, teacher: Teacher) -> None:
        super().__init__()
        self.objective, self.teacher = objective, teacher
        self._opened: nn.Module | None = None
        self._first: FirstWeights | None = None

    def keep_reference(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        """Keep the initial adapters if the teacher is the base under them."""
        if self.context.finish is None and self.teacher.is_base(self.context.plan):
            self._first = FirstWeights(trained)

    def forget_teacher(self) -> None:
        """Free the teacher, once its distributions are stored."""
        self._opened = self._first = None

    def arrays(self, batch: DistillBatch) -> Mapping[str, Array]:  # type: ignore[override]
        return {**super().arrays(batch.tokens), **batch.own_arrays()}

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the loss, summed over the supervised tokens of a batch."""
        losses, values = self._measure(model, tensors)
        return losses.sum(), metric_sums(values, torch.ones_like(values[:, 0]))

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        losses, values = self._measure(model, tensors)
        exact = count_exact(values[:, len(METRICS)], tensors["answers"])
        return losses.sum(), {**metric_sums(values, torch.ones_like(values[:, 0])), "exact_match": exact}

    def teacher_rows(self, session: Any, batches: Iterable[DistillBatch]) -> list[Array]:
        """Return the packed distributions of the teacher for the supervised tokens of each batch."""

        def compute(model: nn.Module, tensors: Tensors) -> torch.Tensor:
            given = ModelInput.of(tensors)
            read, count = self._reader(model, tensors, given), len(given.targets)
            size = max(1, 2**24 // self.objective.width)
            places = [slice(start, start + size) for start in range(0, count, size)]
            return torch.cat([pack_rows(read(place), array_functions).reshape(-1) for place in places])

        columns = self.objective.num_columns
        return [vector.reshape(-1, columns) for vector in session.map_batches(batches, compute)]

    def _measure(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss and the metrics of each supervised token."""
        given = ModelInput.of(tensors)
        self.check_packed(model, given.positions)
        read = self._reader(model, tensors, given)

        def measured(logits: torch.Tensor, place: slice) -> tuple[torch.Tensor, torch.Tensor]:
            targets, weight = given.targets[place], tensors["ce_weight"]
            return measure(
                logits.float(), targets, read(place), self.objective, array_functions, weight=weight
            )

        return self.measure_tokens(
            model,
            given,
            loss_of=lambda logits, place: measured(logits, place)[0],
            values_of=lambda logits, place: measured(logits, place)[1],
        )

    def _reader(
        self, model: nn.Module, tensors: Tensors, given: ModelInput
    ) -> Callable[[slice], TeacherRows]:
        """Return a function for the teacher's distributions of some of the supervised tokens: stored, or computed a chunk at a
        time."""
        stored = tensors.get("teacher")
        if stored is not None:
            return lambda place: unpack_rows(stored[place], self.objective, array_functions)
        self._open()
        if self._first is not None:
            with self._first.restored(model):
                inputs, logits_of = self.head_inputs(model, given, decoder=self.decoder)
        else:
            inputs, logits_of = self.head_inputs(self._opened, given)
        last: tuple[int, TeacherRows] | None = None

        @torch.no_grad()
        def read(place: slice) -> TeacherRows:
            nonlocal last
            if last is None or last[0] != place.start:
                last = None  # before the next is computed
                logits = logits_of(inputs[place]).float()
                rows = read_teacher(logits, given.targets[place], self.objective, array_functions)
                last = (place.start, rows)
            return last[1]

        return read

    def _open(self) -> None:
        """Open the teacher, unless it is open or is the base under the adapters."""
        if self._opened is not None or self._first is not None:
            return
        device = self.context.device
        # Probing quantizers takes a training step, even if the teacher is opened in an evaluation.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            memory_errors(device, doing=LOADING),
            self.teacher.opening(),
        ):
            plan = self.teacher.plan(self.context.plan)
            model, _ = load_model(
                self.teacher.folder, plan=plan, precision=PRECISIONS[plan.precision], device=device
            )
        self._opened = model.requires_grad_(False).eval()
