"""The task of causal language models: load a folder, compute the next-token cross entropy, write the result."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.logit_distance import measure_agreement
from crosstune.core.protocols import Array
from crosstune.data.batches.forked import Fork, ForkedBatch, fork_rows, separate_rows
from crosstune.data.batches.token_batch import IGNORED, Example, TokenBatch, number_answers
from crosstune.estimate.vision import family_of
from crosstune.files.json_files import write_json
from crosstune.models.identity import RECORD, base_record
from crosstune.torch_engine.device import evaluating
from crosstune.torch_engine.kernels.chunked_scans import use_chunked_scans
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.loading.blocks import Expansion
from crosstune.torch_engine.loading.load import load_model
from crosstune.torch_engine.loading.stream import find_tensors, read_tensor
from crosstune.torch_engine.results import export
from crosstune.torch_engine.results.verify import model_logits, original_weights
from crosstune.torch_engine.sharding.context import RowPart, part_options
from crosstune.torch_engine.task import BuildContext, MetricSums, Tensors
from crosstune.torch_engine.tasks.documents import give_masks, separate_documents
from crosstune.torch_engine.tasks.model_input import (
    ModelInput,
    fast_arrays,
    fast_hidden,
    fork_arrays,
    fork_mask,
    noise_of,
    noisy_embeddings,
)
from crosstune.torch_engine.tasks.token_losses import (
    Measure,
    check_router_balance,
    cross_entropy_sum,
    head_inputs,
    measure_model,
    model_token_losses,
    router_balance,
)

_PROBE_TOKENS = 32


class CausalLM:
    """The task of `sft`, and of every recipe that trains a language model on tokens."""

    metric_names: Sequence[str] = ()
    eval_metric_names: Sequence[str] = ("exact_match",)
    context: BuildContext
    """Set by `build`."""

    def __init__(self) -> None:
        self.expansion: Expansion | None = None
        self.decoder: FastDecoder | None = None
        """The fast layers; None if transformers runs the model."""
        self.shares_prompts = True
        """False if the model cannot compute answers that share a prompt in one row; the fast layers always can."""
        self.part: RowPart | None = None
        """The part of every row on this rank; None for whole rows."""
        self.balance = 0.0
        """The weight of the balance loss of a mixture of experts."""
        self._against_trained: dict[str, Any] | None = None

    def build(self, context: BuildContext) -> nn.Module:
        """Load the model folder, quantized and expanded by the plan."""
        assert context.folder is not None, "a causal language model is built from a folder"
        model, self.expansion = load_model(
            context.folder,
            plan=context.plan,
            precision=context.precision,
            device=context.device,
            finish=context.finish,
        )
        use_chunked_scans(model)
        self.context = context
        if context.plan.config.router_aux_loss_coef:
            check_router_balance(model)
            self.balance, self.metric_names = context.plan.config.router_aux_loss_coef, ("router_balance",)
        return model

    def arrays(self, batch: TokenBatch) -> Mapping[str, Array]:
        """Keep only columns where some row is supervised: most prompt tokens never reach the head."""
        if isinstance(batch, ForkedBatch) and self.decoder is None and not self.shares_prompts:
            batch = separate_rows(batch)
        answers, own_positions = number_answers(batch), None
        if self.part is not None:
            batch, answers = self.part.cut(batch)
            own_positions = batch.positions.astype("int64")
        supervised = batch.targets != IGNORED
        [columns] = supervised.any(axis=0).nonzero()
        if not len(columns):
            columns = np.zeros(1, dtype=np.int64)
        kept = supervised[:, columns].reshape(-1)
        decoder = self.decoder if batch.weight > 0 else None
        return ModelInput(
            input_ids=batch.input_ids.astype("int64"),
            targets=batch.targets[supervised].astype("int64"),
            answers=answers,
            columns=columns.astype("int64"),
            # Computed on the host, so that no step waits for the device.
            places=None if kept.all() else kept.nonzero()[0].astype("int64"),
            positions=batch.positions.astype("int64")
            if batch.is_packed or isinstance(batch, ForkedBatch)
            else None,
            own_positions=own_positions,
            real=(batch.segments > 0).astype("int64") if self.balance and batch.has_padding else None,
            noise_keys=batch.noise_keys.view("int32") if batch.noise_keys is not None else None,
            noise_scales=batch.noise_scales,
            **fork_arrays(batch, drop_padding=decoder is not None and decoder.drops_padding),
            **(fast_arrays(batch, drop_padding=decoder.drops_padding) if decoder is not None else {}),
        ).arrays()

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the cross entropy in fp32, summed over the supervised tokens of a batch."""
        given = ModelInput.of(tensors)
        fast = self.decoder if given.rows is not None else None
        self.check_packed(model, given.positions)  # calls the model on other tokens
        with noisy_embeddings(model, *noise_of(given, fast=fast is not None)):
            if fast is not None:
                return fast.loss(fast_hidden(fast, given), given.targets), {}
            if self.balance:
                return self._balanced_loss(model, given)
            return cross_entropy_sum(self.supervised_logits(model, given), given.targets), {}

    def _balanced_loss(self, model: nn.Module, given: ModelInput) -> tuple[torch.Tensor, MetricSums]:
        """Return the cross entropy, with the balance loss of the batch added for each supervised token."""
        options, select = self._model_call(model, given)
        output = model(**options, output_router_logits=True)
        balance = router_balance(model, output.router_logits, given.real)
        count = len(given.targets)
        loss = cross_entropy_sum(select(output.logits), given.targets) + self.balance * count * balance
        return loss, {"router_balance": (balance.detach() * count, count)}

    def evaluate(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the loss, and the number of documents whose supervised tokens are all predicted."""
        given = ModelInput.of(tensors)
        if self.decoder is not None and given.rows is not None:
            loss, is_wrong = self.decoder.loss_and_errors(fast_hidden(self.decoder, given), given.targets)
        else:
            logits = self.supervised_logits(model, given)
            loss, is_wrong = cross_entropy_sum(logits, given.targets), logits.argmax(dim=-1) != given.targets
        return loss, {
            "exact_match": count_exact(is_wrong, given.answers, part=self.part, rows=len(given.input_ids))
        }

    def supervised_logits(self, model: nn.Module, given: ModelInput) -> torch.Tensor:
        """Return the logits of the supervised tokens.

        Rows are padded on the right and attention is causal, so padding needs no mask. In packed rows, transformers finds
        the documents by their restarting positions and keeps attention within each.
        """
        if self.decoder is not None and given.rows is not None:
            return self.decoder.logits(fast_hidden(self.decoder, given))
        options, select = self._model_call(model, given)
        return select(model(**options).logits)

    def _model_call(
        self, model: nn.Module, given: ModelInput
    ) -> tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
        """Return the arguments of the model, and a function that picks the supervised tokens from its output."""
        options: dict[str, Any] = {"input_ids": given.input_ids, "use_cache": False, **given.of_pictures()}
        if given.own_positions is not None:
            assert self.part is not None
            options |= part_options(given.own_positions, self.part)
        elif given.branches is not None:
            options |= {"position_ids": given.positions, "attention_mask": fork_mask(given, model)}
        elif given.positions is not None:
            self.check_packed(model, given.positions)
            options["position_ids"] = row_positions(model, given.positions)
        if given.grid_positions is not None:
            options["position_ids"] = given.grid_positions
        cuts = takes_logits_to_keep(model)
        if cuts:
            options["logits_to_keep"] = given.columns

        def select(output: torch.Tensor) -> torch.Tensor:
            rows = (output if cuts else output[:, given.columns]).flatten(0, 1)
            return rows if given.places is None else rows.index_select(0, given.places)

        return options, select

    def token_losses(
        self, model: nn.Module, given: ModelInput, *, temperature: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cross entropy of each supervised token, and its entropy without a gradient, of the logits divided by the
        temperature."""
        if self.decoder is not None and given.rows is not None:
            hidden = fast_hidden(self.decoder, given)  # the head of the fast layers is a matrix
            return self.decoder.token_losses(
                hidden / temperature if temperature != 1 else hidden, given.targets
            )
        options, select = self._model_call(model, given)
        return model_token_losses(
            model, options, select=select, targets=given.targets, temperature=temperature
        )

    def measure_tokens(
        self, model: nn.Module, given: ModelInput, *, loss_of: Measure, values_of: Measure
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each supervised token from its logits, and values without a gradient, with the logits in chunks."""
        if self.decoder is not None and given.rows is not None:
            return self.decoder.measure(fast_hidden(self.decoder, given), loss_of, values_of)
        options, select = self._model_call(model, given)
        return measure_model(model, options, select=select, loss_of=loss_of, values_of=values_of)

    def head_inputs(
        self, model: nn.Module, given: ModelInput, *, decoder: FastDecoder | None = None
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Return the head's input for the supervised tokens of a model, and a function that computes the logits of some of
        them. Without gradients; by the fast layers of the model if given."""
        if decoder is not None and given.rows is not None:
            with torch.no_grad():
                return fast_hidden(decoder, given), torch.no_grad()(decoder.logits)
        if given.positions is not None and given.branches is None:
            ensure_separates_documents(model, device=given.positions.device)
        options, select = self._model_call(model, given)
        return head_inputs(model, options, select=select)

    def check_packed(self, model: nn.Module, positions: torch.Tensor | None) -> None:
        """Raise if the model cannot train on packed rows; only those have positions."""
        if positions is not None and self.decoder is None:  # the fast layers separate documents themselves
            ensure_separates_documents(model, device=positions.device)

    @contextlib.contextmanager
    def general_layers(self) -> Iterator[None]:
        """Run the model's own layers, with their hooks, in the `with` block."""
        decoder, self.decoder = self.decoder, None
        try:
            yield
        finally:
            self.decoder = decoder

    def base_record(self) -> dict[str, Any]:
        assert self.context.folder is not None
        return base_record(self.context.folder, self.context.plan)

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write a model folder that transformers can load."""
        base = self.context.folder
        assert base is not None
        export.save_model(folder, model.config, self._result_tensors(model, base, trained), base=base)
        record = self.base_record()
        if self.expansion is not None:
            record["new_blocks"] = sorted(self.expansion.new)
        if (
            self._against_trained is not None
        ):  # how far the saved original base deviates from the quantized base
            record["against_trained"] = self._against_trained
        write_json(folder / RECORD, record)

    def _result_tensors(
        self, model: nn.Module, base: Path, trained: Tensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of the model. With new blocks, the frozen base is copied from its files."""
        if self.expansion is None:
            skipped = set(model.all_tied_weights_keys or ())
            yield from ((name, t) for name, t in model.state_dict().items() if name not in skipped)
            return
        for name, place in sorted(find_tensors(base).items()):
            for target, _ in self.expansion.names(name):
                is_new = self.expansion.is_new(target)
                yield target, trained[target].to(place.dtype) if is_new else read_tensor(place)

    def measure_result(self, model: nn.Module) -> None:
        """Compare the logits with the quantized base, as trained, and with the original base, as saved."""
        context = self.context
        if self.expansion is None or context.plan.quant_spec is None:
            return
        assert context.folder is not None
        prompts = [list(range(start, start + _PROBE_TOKENS)) for start in (0, _PROBE_TOKENS)]
        with evaluating(model):
            as_trained = model_logits(model, prompts, precision=context.precision, device=context.device)
            with original_weights(model, context.folder, self.expansion):
                as_saved = model_logits(model, prompts, precision=context.precision, device=context.device)
        self._against_trained = {"original": measure_agreement(as_trained, as_saved).to_json()}


def row_positions(model: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """Return the positions of text in the model's form: some families also take time, height and width."""
    family = family_of(model)
    return positions.expand(4, -1, -1) if family is not None and family.layout == "grid" else positions


def count_exact(
    is_wrong: torch.Tensor, answers: torch.Tensor, *, part: RowPart | None = None, rows: int = 0
) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """Return the number of answers without a wrong token, and the number of answers. With a `part`, of all ranks that share these
    `rows`, each with one answer."""
    if part is not None:
        counts = torch.zeros(2, rows, device=answers.device)
        counts[0].index_add_(0, answers, is_wrong.float())
        counts[1].index_add_(0, answers, torch.ones_like(is_wrong, dtype=torch.float32))
        wrong, seen = part.sum(counts) > 0
        return (seen & ~wrong).sum(), seen.sum()
    if not len(answers):
        return 0, 0
    num_answers = answers[-1] + 1
    errors = torch.zeros(len(answers), device=answers.device).index_add(0, answers, is_wrong.float())
    return num_answers - (errors > 0).sum(), num_answers


def takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def can_share_prompts(model: nn.Module, *, device: torch.device) -> bool:
    """Return True if a trial of answers after a shared prompt gives the logits of separate rows. A model with a window of
    attention cannot: its layers would all use one mask."""
    config: Any = model.config
    kinds = getattr(config, "layer_types", None) or []
    if any(kind != "full_attention" for kind in kinds) or (
        not kinds and getattr(config, "sliding_window", None)
    ):
        return False
    tokens = np.arange(3, 15, dtype=np.int32)
    rows = [np.append(tokens[:6], more) for more in (tokens[6:9], tokens[9:12])]
    marks = np.arange(9) >= 6
    fork = Fork(tuple(Example(tokens=row, supervised=marks, index=0) for row in rows))
    task = CausalLM()
    found = []
    with evaluating(model), torch.no_grad():
        for batch in (forked := fork_rows([[fork]], pad_id=0), separate_rows(forked)):
            arrays = task.arrays(batch)
            given = ModelInput.of(
                {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
            )
            try:
                found.append(task.supervised_logits(model, given).float())
            except (TypeError, ValueError, IndexError, RuntimeError):  # a model without such masks
                return False
    difference, size = (found[0] - found[1]).abs().max(), found[1].abs().max()
    return bool(difference <= (1e-4 if found[0].dtype == torch.float32 else 0.05) * size + 1e-6)


def ensure_separates_documents(model: nn.Module, *, device: torch.device) -> None:
    """Raise if values cross from a document of a packed row into the next. Tested once per model: not every model in
    transformers separates documents by position."""
    if getattr(model, "separates_documents", False):
        return
    separate_documents(model)
    is_leaking = leaks(model, device=device)
    if is_leaking and getattr(getattr(model, "config", None), "layer_types", None):
        give_masks(model)
        is_leaking = leaks(model, device=device)
    if is_leaking:
        raise UserError(
            f"--packing cannot be used with {type(model).__name__}.",
            why="its layers carry values across the boundary between documents in a row.",
            do="remove --packing",
        )
    model.separates_documents = True


def leaks(model: nn.Module, *, device: torch.device) -> bool:
    """Return True if the first document of a packed row changes the logits of the second."""
    documents = torch.arange(1, 25, device=device).reshape(3, 8)
    rows = torch.stack([documents[[0, 2]].reshape(-1), documents[[1, 2]].reshape(-1)])
    positions = torch.arange(8, device=device).repeat(2, 2)
    with evaluating(model), torch.no_grad():
        try:
            found = model(input_ids=rows, position_ids=row_positions(model, positions), use_cache=False)
            logits = found.logits[:, 8:].float()
        except (AttributeError, TypeError, ValueError, IndexError):  # the model takes no such masks
            return True
    return bool((logits[0] - logits[1]).abs().max() > 1e-4 * logits.abs().max())
