"""Sample from a latent-diffusion model: texts from vectors by unmasking, vectors from texts by DDIM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from crosstune.recipes.latent_diffusion.sampling import Decoded, DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.vocabulary import MASK, NUM_SPECIAL, PAD

_BATCH = 512


class Sampler:
    """Decodes and encodes in batches. Random numbers come from a generator of its own."""

    def __init__(self, model: LatentDiffusionModel, *, batch_size: int = _BATCH) -> None:
        self.model, self.batch_size = model, batch_size
        self.settings = model.settings
        self.device = model.text_bias.device

    def length_scores(self, latents: NDArray[Any]) -> NDArray[np.float32]:
        """Return the probability of each number of tokens, from 1, for each vector."""
        found = []
        with self._evaluating():
            for part in self._parts(latents):
                scaled = self._scaled(part)
                blank = torch.full((len(part), 1), MASK, device=self.device)
                ones = torch.ones(len(part), dtype=torch.int64, device=self.device)
                logits = self._predict(blank, ones, scaled, torch.ones_like(scaled[:, 0])).length
                assert logits is not None
                found.append(logits.softmax(-1).cpu().numpy())
        return np.concatenate(found)

    def decode(
        self,
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        lengths: NDArray[Any] | None = None,
        on_step: OnStep | None = None,
    ) -> Decoded:
        """Return token ids for vectors of norm 1, from fully masked text of the likeliest or the given lengths."""
        if lengths is not None:
            return self._decode(latents, np.asarray(lengths), options=options, on_step=on_step)
        chances = self.length_scores(latents)
        order = np.argsort(-chances, axis=1, kind="stable")[:, : options.num_lengths]
        best: Decoded | None = None
        for place in range(order.shape[1]):
            found = self._decode(latents, order[:, place] + 1, options=options, on_step=on_step)
            best = found if best is None else _surer(best, found)
        assert best is not None
        return best

    def _decode(
        self, latents: NDArray[Any], lengths: NDArray[Any], *, options: DecodeOptions, on_step: OnStep | None
    ) -> Decoded:
        real = np.arange(self.settings.max_tokens) < lengths[:, None]
        blank = np.where(real, MASK, PAD)[:, : int(lengths.max(initial=1))]
        return self.fill(blank, lengths, latents, options=options, on_step=on_step)

    def fill(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[Any],
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        on_step: OnStep | None = None,
    ) -> Decoded:
        """Return the tokens with the masked ones filled in, and the probability that each had when it was chosen."""
        rows, filled, scores = len(tokens), [], []
        generator = torch.Generator(self.device).manual_seed(options.seed)
        with self._evaluating():
            for start in range(0, rows, self.batch_size):
                part = slice(start, start + self.batch_size)
                done = self._fill(
                    torch.from_numpy(np.asarray(tokens[part], np.int64)).to(self.device),
                    torch.from_numpy(np.asarray(lengths[part], np.int64)).to(self.device),
                    self._scaled(latents[part]),
                    options=options,
                    generator=generator,
                    on_step=on_step,
                )
                filled.append(done[0].cpu().numpy())
                scores.append(done[1].cpu().numpy())
        return Decoded(
            tokens=np.concatenate(filled), lengths=np.asarray(lengths), scores=np.concatenate(scores)
        )

    def encode(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[Any],
        *,
        steps: int = 10,
        guidance: float = 1.0,
        seed: int = 0,
    ) -> NDArray[np.float32]:
        """Return a vector of norm 1 for each text, by deterministic DDIM from noise."""
        generator = torch.Generator(self.device).manual_seed(seed)
        found = []
        with self._evaluating():
            for start in range(0, len(tokens), self.batch_size):
                part = slice(start, start + self.batch_size)
                rows = torch.from_numpy(np.asarray(tokens[part], np.int64)).to(self.device)
                size = torch.from_numpy(np.asarray(lengths[part], np.int64)).to(self.device)
                clean = self._ddim(rows, size, steps=steps, guidance=guidance, generator=generator)
                found.append(functional.normalize(clean, dim=-1).cpu().numpy())
        return np.concatenate(found)

    def _fill(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        *,
        options: DecodeOptions,
        generator: torch.Generator,
        on_step: OnStep | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unmask the most confident predictions first, about the same number in each step."""
        at_first = (tokens == MASK).sum(1)
        scores = torch.ones(tokens.shape, device=self.device)
        for step in range(options.steps):
            masked = tokens == MASK
            logits = self._guided(tokens, lengths, latents, masked.sum(1) / lengths, options.guidance)
            chosen, sure = _choose(logits, options.temperature, generator)
            left = (at_first * (options.steps - 1 - step)) // options.steps
            order = torch.where(masked, sure, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
            opened = masked & (order < (masked.sum(1) - left)[:, None])
            tokens = torch.where(opened, chosen, tokens)
            scores = torch.where(opened, sure, scores)
            if on_step is not None:
                on_step(step + 1, options.steps, tokens.cpu().numpy())
        return tokens, scores

    def _guided(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        time: torch.Tensor,
        guidance: float,
    ) -> torch.Tensor:
        logits = self._predict(tokens, lengths, latents, time).logits
        assert logits is not None
        if guidance != 1.0:
            free = self._predict(tokens, lengths, latents, time, free=True).logits
            assert free is not None
            logits = free.float() + guidance * (logits.float() - free.float())
        logits = logits.float()
        logits[..., :NUM_SPECIAL] = -torch.inf
        return logits

    def _predict(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        time: torch.Tensor,
        *,
        latent_time: torch.Tensor | None = None,
        free: bool = False,
    ) -> Any:
        if latent_time is None:
            latent_time = torch.full((len(tokens),), 1.0 if free else 0.0, device=self.device)
        without = torch.full((len(tokens),), free, device=self.device)
        return self.model(tokens, lengths, latents, time.float(), latent_time, without)

    def _ddim(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        steps: int,
        guidance: float,
        generator: torch.Generator,
    ) -> torch.Tensor:
        rows, dim = len(tokens), self.settings.latent_dim
        noisy = torch.randn(rows, dim, generator=generator, device=self.device)
        times = torch.linspace(1 - 1e-3, 0.0, steps + 1, device=self.device)
        clean = noisy
        hidden = torch.where(tokens == PAD, PAD, MASK)
        for now, after in itertools.pairwise(times):
            time = now.expand(rows)
            clean = self._clean(tokens, lengths, noisy, time, torch.zeros_like(time))
            if guidance != 1.0:
                free = self._clean(hidden, lengths, noisy, time, torch.ones_like(time))
                clean = free + guidance * (clean - free)
            clean = functional.normalize(clean, dim=-1) * dim**0.5  # every vector of the data has this norm
            alpha, sigma = signal_noise(time)
            next_alpha, next_sigma = signal_noise(after.expand(rows))
            noisy = next_alpha * clean + next_sigma * (noisy - alpha * clean) / sigma
        return clean

    def _clean(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        noisy: torch.Tensor,
        time: torch.Tensor,
        text_time: torch.Tensor,
    ) -> torch.Tensor:
        predicted = self._predict(tokens, lengths, noisy, text_time, latent_time=time).latent
        assert predicted is not None, "the model was trained without predicting latents"
        return to_clean(predicted, noisy, time, self.settings.latent_parameterization)

    def _scaled(self, latents: NDArray[Any]) -> torch.Tensor:
        scaled = np.asarray(latents, np.float32) * np.float32(self.settings.latent_dim**0.5)
        return torch.from_numpy(scaled).to(self.device)

    def _parts(self, rows: NDArray[Any]) -> Iterator[NDArray[Any]]:
        yield from (rows[start : start + self.batch_size] for start in range(0, len(rows), self.batch_size))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train(was_training)


def _surer(one: Decoded, other: Decoded) -> Decoded:
    """Return for each row the one whose tokens have the higher mean logarithm of their probability."""
    width = max(one.tokens.shape[1], other.tokens.shape[1])
    tokens, scores, sure = [], [], []
    for found in (one, other):
        missing = ((0, 0), (0, width - found.tokens.shape[1]))
        tokens.append(np.pad(found.tokens, missing, constant_values=PAD))
        scores.append(np.pad(found.scores, missing, constant_values=1.0))
        sure.append(np.log(np.maximum(scores[-1], 1e-9)).sum(1) / found.lengths)
    second = sure[1] > sure[0]
    return Decoded(
        tokens=np.where(second[:, None], tokens[1], tokens[0]),
        lengths=np.where(second, other.lengths, one.lengths),
        scores=np.where(second[:, None], scores[1], scores[0]),
    )


def _choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each place, the likeliest or a drawn one, and its probability."""
    chances = (logits / (temperature or 1.0)).softmax(-1)
    if temperature:
        flat = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(chances.shape[:2])
    else:
        flat = chances.argmax(-1)
    return flat, chances.gather(-1, flat[..., None])[..., 0]


def signal_noise(time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the clean vector and of the noise, with a column each."""
    angle = 0.5 * torch.pi * time.float()[:, None]
    return angle.cos(), angle.sin()


def to_clean(predicted: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the clean vector that a prediction stands for."""
    if kind == "x0":
        return predicted
    alpha, sigma = signal_noise(time)
    if kind == "v":
        return alpha * noisy - sigma * predicted
    return (noisy - sigma * predicted) / alpha.clamp(min=1e-3)
