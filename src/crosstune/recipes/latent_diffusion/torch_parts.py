"""Define the torch task of latent diffusion: the model, and the losses of masked tokens, latents and lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from crosstune.core.protocols import Array
from crosstune.recipes.latent_diffusion.batch import PairBatch
from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_denoise import signal_noise, to_clean
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler
from crosstune.recipes.latent_diffusion.vocabulary import MASK
from crosstune.torch_engine import export
from crosstune.torch_engine.task import BuildContext, MetricSums, Tensors

_OF_LATENT_LOSS = ("latents", "noise", "latent_factor")
_WORTH_SKIPPING = 0.25
"""Share of padding from which on a GPU leaves it out; below, gathering costs more than it saves."""


class LatentDiffusionTask:
    """Build the model of some settings and compute its losses. `modes` are all modes of the training."""

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
        """Whether padding is left out where there is much of it. A CPU keeps it, and with it the numbers that it had."""

    def build(self, opening: BuildContext) -> nn.Module:
        """Draw the model's weights on the host, so that they are the same on every device, and freeze what the modes do
        not train."""
        precision = opening.precision
        model = LatentDiffusionModel(self.settings, compute_dtype=precision.autocast or precision.weights)
        model.predict(text=self.modes != {"t2l"}, latent=self.modes != {"l2t"})
        for block in model.blocks:
            block.fuses_attention = opening.plan.config.use_flash_attention is not False
        self.skips_padding = model.aligns_logits = opening.device.type == "cuda"
        self.model = model.to(opening.device, precision.weights)
        return self.model

    def arrays(self, batch: PairBatch) -> Mapping[str, Array]:
        """Cut columns that are padding in every row, and list the masked tokens to predict. What only the latent loss
        reads is left out where no mode has one, since it is most of what would be copied to the device."""
        width = int(batch.lengths.max(initial=1))
        arrays: dict[str, Any] = batch.arrays()
        if self.modes == {"l2t"}:
            arrays = {name: array for name, array in arrays.items() if name not in _OF_LATENT_LOSS}
        for name in ("tokens", "masked"):
            arrays[name] = arrays[name][:, :width]
        wanted = arrays["masked"] & (batch.text_factor > 0)[:, None]
        places = np.flatnonzero(wanted)
        rows = places // max(1, width)
        if self.skips_padding and batch.num_tokens <= (1 - _WORTH_SKIPPING) * arrays["tokens"].size:
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
        """Return the losses of a batch, each term weighted by its factor, and their plain sums as metrics."""
        output = model(
            tokens=torch.where(tensors["masked"], MASK, tensors["tokens"]),
            lengths=tensors["lengths"],
            latents=tensors["noisy"],
            text_time=tensors["text_time"],
            latent_time=tensors["latent_time"],
            without_latent=tensors["without_latent"],
            places=tensors["places"],
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
        """Sum the cross entropy of masked tokens, which training weighs alike; the ELBO weighs each by 1 / t."""
        targets = tensors["targets"]
        each = functional.cross_entropy(logits.float(), targets, reduction="none")
        with torch.no_grad():
            count = len(targets)
            right = (logits.argmax(-1) == targets).sum()
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
        target = _target(self.settings.latent_parameterization, tensors)
        each = latent_losses(predicted, target, kind=self.latent_loss)
        factor = tensors["latent_factor"]
        counts = factor > 0
        clean = to_clean(
            predicted, tensors["noisy"], tensors["latent_time"], self.settings.latent_parameterization
        )
        cosine = functional.cosine_similarity(clean, tensors["latents"], dim=-1)
        metrics["latent_loss"] = ((each.detach() * counts).sum(), counts.sum())
        metrics["latent_cosine"] = ((cosine.detach() * counts).sum(), counts.sum())
        return (each * factor).sum()

    def sampler(self) -> Sampler:
        """Return what decodes and encodes with the weights as they are now."""
        assert self.model is not None, "the model is not built yet"
        return Sampler(self.model)

    def write_model(self, model: nn.Module, folder: Path, *, trained: Tensors) -> None:
        """Write the weights in fp32, as trained; `complete_result` of the recipe adds the vocabulary."""
        tensors = {**model.state_dict(), **trained}
        export.save_tensors(folder, ((name, tensor.float()) for name, tensor in tensors.items()))
        self.settings.save(folder)


def latent_losses(predicted: torch.Tensor, target: torch.Tensor, *, kind: str) -> torch.Tensor:
    """Return the loss of each row: 1 - cosine, or the mean squared error over the columns."""
    if kind == "cosine":
        return 1.0 - functional.cosine_similarity(predicted, target, dim=-1)
    return (predicted - target).square().mean(-1)


def _target(kind: str, tensors: Tensors) -> torch.Tensor:
    if kind == "x0":
        return tensors["latents"]
    if kind == "epsilon":
        return tensors["noise"]
    alpha, sigma = signal_noise(tensors["latent_time"])
    return alpha * tensors["noise"] - sigma * tensors["latents"]
