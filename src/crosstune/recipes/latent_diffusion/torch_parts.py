"""Train latent diffusion with torch (losses of tokens, latents and lengths), and embed texts with an encoder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from crosstune.core.errors import UserError, shown
from crosstune.core.protocols import Array
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.files.safetensors_header import read_header
from crosstune.process.this_process import hide_output
from crosstune.recipes.latent_diffusion.batch import PairBatch
from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_blocks import FusedBlocks
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.torch_parts_packed import Packed, cross_entropy, pack_rows
from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler, signal_noise, to_clean
from crosstune.recipes.latent_diffusion.vocabulary import MASK, tokenize
from crosstune.torch_engine.results import export
from crosstune.torch_engine.task import BuildContext, MetricSums, Tensors

_OF_LATENT_LOSS = ("latents", "noise", "latent_factor")
_WORTH_SKIPPING = 0.25
"""Fraction of padding from which skipping it is faster on a GPU."""
_ENCODED_ROWS = {"cpu": 256}
"""Texts embedded at a time, by device type; 2048 on GPUs."""


class LatentDiffusionTask:
    """Build the model and compute its losses. `modes` are all modes of the run."""

    metric_names: Sequence[str] = (
        "text_loss",
        "text_accuracy",
        "nats_per_token",
        "length_loss",
        "latent_loss",
        "latent_cosine",
    )

    def __init__(self, settings: ModelSettings, *, modes: set[str], latent_loss: str = "cosine") -> None:
        self.settings, self.modes, self.latent_loss = settings, modes, latent_loss
        self.model: LatentDiffusionModel | None = None
        self.skips_padding = False
        """Skip padding where there is much of it; only on GPUs."""

    def build(self, opening: BuildContext) -> nn.Module:
        """Draw the weights on the CPU, so that every device starts with the same, and freeze those without a gradient."""
        precision = opening.precision
        model = LatentDiffusionModel(self.settings, compute_dtype=precision.autocast or precision.weights)
        model.predict(text=self.modes != {"t2l"}, latent=self.modes != {"l2t"})
        for block in model.blocks:
            block.fuses_attention = opening.plan.config.use_flash_attention is not False
        self.skips_padding = model.aligns_logits = opening.device.type == "cuda"
        self.model = model.to(opening.device, precision.weights)
        if opening.plan.config.kernels == "fast":
            model.fused = FusedBlocks(model)
        return self.model

    @contextlib.contextmanager
    def general_layers(self) -> Iterator[None]:
        """Use the general blocks in the `with` block, for batches prepared before it or in it."""
        assert self.model is not None
        fused, self.model.fused = self.model.fused, None
        try:
            yield
        finally:
            self.model.fused = fused

    def arrays(self, batch: PairBatch) -> Mapping[str, Array]:
        """Return the arrays for the device, without padding columns, and the masked tokens to predict.

        Without a latent loss its inputs are dropped, since they would be most of the copied bytes.
        """
        width = int(batch.lengths.max(initial=1))
        arrays: dict[str, Any] = batch.arrays()
        if self.modes == {"l2t"}:
            arrays = {name: array for name, array in arrays.items() if name not in _OF_LATENT_LOSS}
        for name in ("tokens", "masked"):
            arrays[name] = arrays[name][:, :width]
        wanted = arrays["masked"] & (batch.text_factor > 0)[:, None]
        places = np.flatnonzero(wanted)
        rows = places // max(1, width)
        if self.model is not None and self.model.fused is not None:
            arrays |= pack_rows(batch.lengths, self.settings.latent_tokens)
            found = np.searchsorted(arrays["text_sources"], places)
            arrays["packed_places"] = arrays["text_places"][found]
            counted = places
        elif self.skips_padding and batch.num_tokens <= (1 - _WORTH_SKIPPING) * arrays["tokens"].size:
            is_real = np.arange(width) < batch.lengths[:, None]
            arrays["real_place"] = np.flatnonzero(is_real)
            arrays["real_row"] = arrays["real_place"] // width
            counted = (np.cumsum(is_real) - 1)[places]
        else:
            counted = places
        return arrays | {
            "places": counted,
            "targets": arrays["tokens"].reshape(-1)[places],
            "place_factor": batch.text_factor[rows],
            "place_elbo": (1.0 / batch.text_time[rows]).astype(np.float32),
        }

    def loss(self, model: nn.Module, tensors: Tensors) -> tuple[torch.Tensor, MetricSums]:
        """Return the weighted sum of the losses, and the unweighted sums as metrics."""
        packed = None
        if self.model is not None and self.model.fused is not None and "is_latent" in tensors:
            longest = tensors["tokens"].shape[1] + self.settings.latent_tokens
            packed = Packed.from_arrays(tensors, longest=longest)
        output = model(
            tokens=torch.where(tensors["masked"], MASK, tensors["tokens"]),
            lengths=tensors["lengths"],
            latents=tensors["noisy"],
            text_time=tensors["text_time"],
            latent_time=tensors["latent_time"],
            without_latent=tensors["without_latent"],
            places=tensors["places"] if packed is None else tensors["packed_places"],
            packed=packed,
            real=(tensors["real_row"], tensors["real_place"]) if "real_row" in tensors else None,
        )
        loss = torch.zeros((), device=tensors["tokens"].device)
        metrics: dict[str, tuple[Any, Any]] = {}
        if output.logits is not None:
            loss = (
                loss
                + self._text(output.logits, tensors, metrics)
                + self._length(output.length, tensors, metrics)
            )
        if output.latent is not None:
            loss = loss + self._latent(output.latent, tensors, metrics)
        return loss, metrics

    def _text(self, logits: torch.Tensor, tensors: Tensors, metrics: dict[str, Any]) -> torch.Tensor:
        """Sum the cross entropy of masked tokens, with equal weights in the loss and with 1 / t in the ELBO."""
        targets = tensors["targets"]
        right = (logits.detach().argmax(-1) == targets).sum()
        if self.model is not None and self.model.fused is not None:
            each = cross_entropy(logits, targets)
        else:
            each = functional.cross_entropy(logits.float(), targets, reduction="none")
        with torch.no_grad():
            count = len(targets)
            tokens = (tensors["lengths"] * (tensors["text_factor"] > 0)).sum()
            metrics["text_loss"] = (each.sum(), count)
            metrics["text_accuracy"] = (right, count)
            metrics["nats_per_token"] = ((each * tensors["place_elbo"]).sum(), tokens)
        return (each * tensors["place_factor"]).sum()

    def _length(self, logits: torch.Tensor | None, tensors: Tensors, metrics: dict[str, Any]) -> torch.Tensor:
        assert logits is not None
        factor = tensors["length_factor"]
        each = functional.cross_entropy(logits, tensors["lengths"] - 1, reduction="none")
        counts = factor > 0
        metrics["length_loss"] = ((each.detach() * counts).sum(), counts.sum())
        return (each * factor).sum()

    def _latent(self, predicted: torch.Tensor, tensors: Tensors, metrics: dict[str, Any]) -> torch.Tensor:
        kind, clean = self.settings.latent_parameterization, tensors["latents"]
        if kind == "x0":
            target = clean
        elif kind == "epsilon":
            target = tensors["noise"]
        else:
            alpha, sigma = signal_noise(tensors["latent_time"])
            target = alpha * tensors["noise"] - sigma * clean
        if self.latent_loss == "cosine":
            each = 1.0 - functional.cosine_similarity(predicted, target, dim=-1)
        else:
            each = (predicted - target).square().mean(-1)
        factor = tensors["latent_factor"]
        counts = factor > 0
        found = to_clean(predicted, tensors["noisy"], tensors["latent_time"], kind)
        cosine = functional.cosine_similarity(found, clean, dim=-1)
        metrics["latent_loss"] = ((each.detach() * counts).sum(), counts.sum())
        metrics["latent_cosine"] = ((cosine.detach() * counts).sum(), counts.sum())
        return (each * factor).sum()

    def sampler(self) -> Sampler:
        """Return a sampler that uses the current weights."""
        assert self.model is not None, "the model is not built yet"
        return Sampler(self.model)

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write the weights in fp32. The recipe's `complete_result` adds the vocabulary."""
        tensors = {**model.state_dict(), **trained}
        export.save_tensors(folder, ((name, tensor.float()) for name, tensor in tensors.items()))
        self.settings.save(folder)


class SentenceEncoder:
    """A sentence-transformers folder, loaded with transformers: pooled token vectors of norm 1."""

    def __init__(
        self,
        folder: Path,
        *,
        record: dict[str, Any],
        longest: int,
        device: str | None = None,
        on_text: Callable[[int, int], None] | None = None,
    ) -> None:
        self.device = choose_device(device)
        self._record, self._on_text = record, on_text
        self._model = _load_encoder(folder).to(self.device)
        opened = Tokenizer.from_folder(folder)
        self._tokenizer = replace(opened, rust=deepcopy(opened.rust))  # others read without truncation
        self._tokenizer.rust.enable_truncation(longest)

    def record(self) -> dict[str, Any]:
        return self._record

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return a vector of norm 1 for each text; zero for a text without tokens.

        Texts are batched by length, for little padding.
        """
        tokens = tokenize(self._tokenizer, texts, special_tokens=True)
        order = np.argsort(np.fromiter(map(len, texts), np.int64, len(texts)), kind="stable")
        order = order[tokens.lengths[order] > 0]
        vectors = np.zeros((len(texts), int(self._record["dim"])), np.float32)
        size = _ENCODED_ROWS.get(self.device.type, 2048)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            batch = tokens.take(rows)
            width = int(batch.lengths.max())
            ids = batch.stack(width=width, dtype=np.int64)
            mask = (np.arange(width) < batch.lengths[:, None]).astype(np.int64)
            vectors[rows] = self._embed(ids, mask).cpu().numpy()
            if self._on_text is not None:
                self._on_text(start + len(rows), len(order))
        return vectors

    @torch.inference_mode()
    def _embed(self, ids: NDArray[np.int64], mask: NDArray[np.int64]) -> torch.Tensor:
        real = torch.from_numpy(mask).to(self.device)
        states = self._model(
            input_ids=torch.from_numpy(ids).to(self.device), attention_mask=real
        ).last_hidden_state.float()
        if self._record["pooling"] == "cls":
            pooled = states[:, 0]
        else:
            weights = real[..., None].float()
            pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
        return functional.normalize(pooled, dim=-1)


def _load_encoder(folder: Path) -> nn.Module:
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise UserError("Embedding texts needs transformers.", do="pip install 'crosstune[torch]'") from error
    for file in sorted(folder.glob("*.safetensors")):
        read_header(file)  # its error mentions the damaged file, unlike transformers' error
    with hide_output():
        model: nn.Module = AutoModel.from_pretrained(
            str(folder),
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    return model.eval().requires_grad_(False)


def choose_device(name: str | None) -> torch.device:
    """Return a torch device by name, by default the GPU if there is one; raise if it does not exist."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "xpu": torch.xpu.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    here = [f"{kind}:{n}" if n else kind for kind, count in counts.items() for n in range(count)]
    if name.removesuffix(":0") not in here:
        raise UserError(f"There is no device {shown(name)}.", do=f"available devices: {', '.join(here)}")
    return torch.device(name)
