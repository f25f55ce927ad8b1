"""Train causal language models from a model folder with next-token cross entropy."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.json_files import write_json
from crosstune.core.logit_distance import measure_agreement
from crosstune.core.protocols import UNSURE, Array
from crosstune.data.shared_prefix import SharedRow, share_prefix
from crosstune.data.token_batch import IGNORED, TokenBatch, without_padding
from crosstune.models.folder import EXPERT_COUNTS
from crosstune.models.folder_record import RECORD
from crosstune.models.identity import identity
from crosstune.torch_engine import export
from crosstune.torch_engine.blocks import Expansion
from crosstune.torch_engine.cross_entropy import cross_entropy_sum
from crosstune.torch_engine.device import evaluating
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.load import load_model
from crosstune.torch_engine.original_weights import original_weights
from crosstune.torch_engine.precision import PRECISIONS
from crosstune.torch_engine.rope_lengths import has_changing_rope
from crosstune.torch_engine.stream import find_tensors, read_tensor
from crosstune.torch_engine.task import MetricSums, Opening, Tensors
from crosstune.torch_engine.verify import model_logits

_PROBE_TOKENS = 32
_SURE_LEADS = {PRECISIONS["fp32"]: 1e-3, PRECISIONS["bf16_autocast"]: 0.1}
"""By how much the largest logit must lead on a CPU, relative to it, to be the largest however it is rounded: some 100 times
(fp32) and 3 times (bf16) more than leads differ between one pass over a row and one over each of its tokens."""
SHARING_MODELS = ("llama", "qwen2", "qwen3")
_SHARING_PRECISIONS = (PRECISIONS["fp32"], PRECISIONS["bf16_autocast"])
FAST_ARRAYS = ("input_ids", "positions", "unpadded_ids", "unpadded_positions", "bounds", "rows", "wanted")
"""The arrays of a batch that the fast layers read."""


class CausalLM:
    """The task of `sft`, and of every recipe that trains a language model on tokens."""

    metric_names: Sequence[str] = ()
    may_share_prefixes: bool = True
    """True if tokens that all rows of a batch begin with may be computed once."""

    def __init__(self) -> None:
        self.opening: Opening | None = None
        self.expansion: Expansion | None = None
        self.decoder: FastDecoder | None = None
        """Runs the model's layers instead of transformers, if --kernels is fast."""
        self._against_trained: dict[str, Any] | None = None
        self._predicted: list[torch.Tensor] | None = None
        self._sure_lead: float | None = None
        self._shares_prefixes = False

    def build(self, opening: Opening) -> nn.Module:
        """Load the model folder, quantized and expanded as the plan says."""
        assert opening.folder is not None, "a causal language model is built from a folder"
        model, self.expansion = load_model(
            opening.folder,
            plan=opening.plan,
            precision=opening.precision,
            device=opening.device,
            finish=opening.finish,
        )
        self.opening = opening
        self._sure_lead = sure_lead(model, opening)
        self._shares_prefixes = self.may_share_prefixes and takes_shared_rows(model, opening)
        return model

    def arrays(self, batch: TokenBatch) -> Mapping[str, Array]:
        """Keep only columns where some row is supervised: most prompt tokens never reach the head. Rows that begin alike
        may stand in one row, which computes their common tokens once."""
        # In fp8, gradients that are added up before they are rounded would differ from those of rows of their own.
        in_fp8 = self.decoder is not None and self.decoder.fp8_scratch is not None
        shared = share_prefix(batch) if self._shares_prefixes and not in_fp8 else None
        if shared is not None:
            return _shared_arrays(shared)
        columns = (batch.targets != IGNORED).any(axis=0).nonzero()[0]
        if not len(columns):
            columns = np.zeros(1, dtype=np.int64)
        targets = batch.targets[:, columns].astype("int64")
        arrays = {
            "input_ids": batch.input_ids.astype("int64"),
            "columns": columns.astype("int64"),
            "targets": targets,
        }
        if (
            targets == IGNORED
        ).any():  # found on the host, so that no step waits for the device to count them
            arrays["places"] = (targets.reshape(-1) != IGNORED).nonzero()[0].astype("int64")
        if batch.is_packed:
            arrays["positions"] = batch.positions.astype("int64")
        if self.decoder is None:
            return arrays
        return arrays | fast_arrays(batch, drop_padding=self.decoder.drops_padding)

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the cross entropy in fp32, summed over the supervised tokens of a batch."""
        if self.decoder is not None and "rows" in tensors and self._predicted is None:
            return self.decoder.loss(self._fast_hidden(self.decoder, tensors), tensors["wanted"]), {}
        logits, targets, _ = self.supervised_logits(model, tensors)
        if self._predicted is not None and self._sure_lead is not None:
            self._predicted.append(likeliest_tokens(logits, lead=self._sure_lead).cpu())
        return cross_entropy_sum(logits, targets), {}

    def supervised_logits(
        self, model: nn.Module, tensors: Tensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of the supervised tokens, their targets, and their mask in the flattened columns.

        Rows are padded on the right and attention is causal, so no token attends to padding and no mask is needed. In
        packed rows, restarting positions tell transformers where each document begins, and attention stays within it.
        """
        flat = tensors["targets"].reshape(-1)
        kept = flat != IGNORED
        if self.decoder is not None and "rows" in tensors:
            hidden = self._fast_hidden(self.decoder, tensors)
            return self.decoder.logits(hidden), tensors["wanted"], kept
        options: dict[str, Any] = {"input_ids": tensors["input_ids"], "use_cache": False}
        self.check_batch(model, tensors)
        if "positions" in tensors:
            options["position_ids"] = tensors["positions"]
        if "seen" in tensors:
            options["attention_mask"] = tensors["seen"]
        if takes_logits_to_keep(model):
            logits = model(**options, logits_to_keep=tensors["columns"]).logits
        else:
            logits = model(**options).logits[:, tensors["columns"]]
        logits = logits.reshape(-1, logits.shape[-1])
        if "places" in tensors:
            logits, flat = (of.index_select(0, tensors["places"]) for of in (logits, flat))
        return logits, flat, kept

    def check_batch(self, model: nn.Module, tensors: Tensors) -> None:
        """Check that the model can train on packed rows. The fast layers separate documents by themselves."""
        if "positions" in tensors and "seen" not in tensors and self.decoder is None:
            ensure_separates_documents(model, device=tensors["input_ids"].device)

    @contextlib.contextmanager
    def predicting(self) -> Iterator[list[torch.Tensor] | None]:
        """Collect the likeliest tokens of each batch whose loss is computed inside the block. None in a precision that may
        round differently in generation."""
        self._predicted = [] if self._sure_lead is not None else None
        try:
            yield self._predicted
        finally:
            self._predicted = None

    @contextlib.contextmanager
    def general_layers(self) -> Iterator[None]:
        """Run the model's own layers inside the block, which call their hooks."""
        decoder, self.decoder = self.decoder, None
        try:
            yield
        finally:
            self.decoder = decoder

    def _fast_hidden(self, decoder: FastDecoder, tensors: Tensors) -> torch.Tensor:
        unpadded = "unpadded_" if "unpadded_ids" in tensors else ""
        return decoder.hidden(
            tensors["unpadded_ids" if unpadded else "input_ids"],
            positions=tensors.get(f"{unpadded}positions"),
            bounds=tensors.get("bounds"),
            seen=tensors.get("seen"),
            rows=tensors["rows"],
        )

    def base_record(self) -> dict[str, Any]:
        """Return a record of the base weights, their quantization and the precision of the training."""
        opening = self._opened()
        assert opening.folder is not None
        spec = opening.plan.quant_spec
        return {
            "base": {"name": opening.plan.config.model_name, "identity": identity(opening.folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": opening.plan.precision,
        }

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write a model folder that transformers can load."""
        base = self._opened().folder
        assert base is not None
        export.save_model(folder, model.config, self._result_tensors(model, base, trained), base=base)
        write_json(folder / RECORD, self.base_record() | self._expansion_record())

    def _result_tensors(
        self, model: nn.Module, base: Path, trained: Tensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of the model. With new blocks, the frozen base is copied unchanged from its files."""
        if self.expansion is None:
            skipped = set(model.all_tied_weights_keys or ())
            yield from ((name, t) for name, t in model.state_dict().items() if name not in skipped)
            return
        for name, place in sorted(find_tensors(base).items()):
            for target, _ in self.expansion.names(name):
                is_new = self.expansion.is_new(target)
                yield target, trained[target].to(place.dtype) if is_new else read_tensor(place)

    def _expansion_record(self) -> dict[str, Any]:
        """Return which blocks are new and, after training on a quantized base, the effect of saving the original one."""
        if self.expansion is None:
            return {}
        measured = {"against_trained": self._against_trained} if self._against_trained is not None else {}
        return {"new_blocks": sorted(self.expansion.new)} | measured

    def measure_result(self, model: nn.Module) -> None:
        """Compare the new blocks over the quantized base, which were trained, with those over the original one."""
        opening = self._opened()
        if self.expansion is None or opening.plan.quant_spec is None:
            return
        assert opening.folder is not None
        prompts = [list(range(start, start + _PROBE_TOKENS)) for start in (0, _PROBE_TOKENS)]
        with evaluating(model):
            as_trained = model_logits(model, prompts, precision=opening.precision, device=opening.device)
            with original_weights(model, opening.folder, self.expansion):
                as_saved = model_logits(model, prompts, precision=opening.precision, device=opening.device)
        self._against_trained = {"original": measure_agreement(as_trained, as_saved).to_json()}

    def _opened(self) -> Opening:
        assert self.opening is not None, "the model is not built yet"
        return self.opening


def fast_arrays(batch: TokenBatch, *, drop_padding: bool) -> dict[str, Array]:
    """Return what the fast layers read besides: indices and targets of the supervised tokens, and the bounds of packed
    documents. Computed on the host, so that no step waits for the device to count them. With `drop_padding`, documents
    stand in one row if the batch has padding; supervised tokens keep their order."""
    if batch.weight == 0:
        return {}
    arrays: dict[str, Array] = {}
    if drop_padding and batch.has_padding:
        batch = without_padding(batch)
        arrays |= {
            "unpadded_ids": batch.input_ids.astype("int64"),
            "unpadded_positions": batch.positions.astype("int64"),
        }
    flat = batch.targets.reshape(-1)
    [rows] = (flat != IGNORED).nonzero()
    arrays |= {"rows": rows.astype("int64"), "wanted": flat[rows].astype("int64")}
    if batch.is_packed:
        starts = np.diff(batch.positions, axis=1, prepend=batch.positions[:, :1] - 1) != 1
        starts[:, 0] = True
        [first] = starts.reshape(-1).nonzero()
        arrays["bounds"] = np.append(first, flat.size).astype("int32")
    return arrays


def takes_shared_rows(model: nn.Module, opening: Opening) -> bool:
    """Return whether rows may be computed as one whose tokens see what a mask says: on a CPU, in the precisions in which it
    was measured, and with models that take such a mask as it is."""
    plan, config = opening.plan, model.config
    measured = plan.backend.name == "cpu" and opening.precision in _SHARING_PRECISIONS
    plain = not (plan.config.torch_compile or plan.config.lora_dropout or has_changing_rope(config))
    masks = config.model_type in SHARING_MODELS and config._attn_implementation == "sdpa"
    return measured and plain and masks and not getattr(config, "use_sliding_window", False)


def _shared_arrays(row: SharedRow) -> dict[str, Array]:
    [places] = (row.targets != IGNORED).nonzero()
    places = places.astype("int64")
    wanted = row.targets[places].astype("int64")
    return {
        "input_ids": row.tokens[None].astype("int64"),
        "positions": row.positions[None].astype("int64"),
        "seen": row.seen[None, None],
        "columns": places,
        "targets": wanted[None],
        "rows": places,
        "wanted": wanted,
    }


def sure_lead(model: nn.Module, opening: Opening) -> float | None:
    """Return the lead with which a logit is the largest in generation too; None if it may not be. In 16 bits, rounding may
    send a token to other experts."""
    has_experts = any(getattr(model.config, name, None) for name in EXPERT_COUNTS)
    if has_experts and opening.precision != PRECISIONS["fp32"]:
        return None
    return _SURE_LEADS.get(opening.precision)


def likeliest_tokens(logits: torch.Tensor, *, lead: float) -> torch.Tensor:
    """Return the token with the largest logit in each row, UNSURE where its lead is less: relative to it or, since all logits
    of a row may be moved alike, to its distance from their mean."""
    logits = logits.detach()
    best, tokens = logits.topk(2, dim=-1)
    largest, second = best.float().unbind(dim=-1)
    size = torch.maximum(largest.abs(), largest - logits.mean(dim=-1, dtype=torch.float32)).clamp(min=1.0)
    return torch.where(largest - second > lead * size, tokens[:, 0], UNSURE)


def takes_logits_to_keep(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def ensure_separates_documents(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless documents in a packed row cannot attend to each other. Tried once per model: not every model in
    transformers separates documents by position, and one that does not would silently train on mixed documents."""
    if getattr(model, "separates_documents", False):
        return
    documents = torch.arange(1, 25, device=device).reshape(3, 8)
    rows = torch.stack([documents[[0, 2]].reshape(-1), documents[[1, 2]].reshape(-1)])
    positions = torch.arange(8, device=device).repeat(2, 2)
    with evaluating(model), torch.no_grad():
        logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits[:, 8:].float()
    if (logits[0] - logits[1]).abs().max() > 1e-4 * logits.abs().max():
        raise UserError(
            f"--packing cannot be used with {type(model).__name__}.",
            why="its attention crosses the boundary between documents in a row.",
            do="leave out --packing",
        )
    model.separates_documents = True
