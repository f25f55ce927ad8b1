"""Sample from a latent-diffusion model: texts from vectors, vectors from texts, or both from noise."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.nn import functional

from crosstune.core.errors import UserError
from crosstune.core.weights import check_fit
from crosstune.recipes.latent_diffusion.batch import T_MIN, draw
from crosstune.recipes.latent_diffusion.settings import (
    Decoded,
    DecodeOptions,
    Generated,
    ModelSettings,
    OnStep,
)
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel, Output
from crosstune.recipes.latent_diffusion.vocabulary import MASK, NUM_SPECIAL, PAD
from crosstune.torch_engine.device import evaluating
from crosstune.torch_engine.loading.stream import find_tensors, read_tensor

_BATCH = 512
_NATS_ROWS = 1024
"""Fewest masked rows for an estimate of the bound."""


class Sampler:
    """Decode, encode and generate in batches, with a seeded random generator."""

    def __init__(self, model: LatentDiffusionModel, *, batch_size: int = _BATCH) -> None:
        self.model, self.batch_size = model, batch_size
        self.settings = model.settings
        self.device = model.text_bias.device

    def length_scores(self, latents: NDArray[Any]) -> NDArray[np.float32]:
        """Return the probability of each number of tokens, from 1, for each vector."""
        [found] = self._in_batches(lambda part: [self._length_chances(part)], self._scaled(latents))
        return found

    def decode(
        self,
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        lengths: NDArray[Any] | None = None,
        on_step: OnStep | None = None,
    ) -> Decoded:
        """Decode vectors of norm 1 from fully masked text, of the likeliest or the given lengths.

        Of several lengths, keep the text with the highest mean log probability of its tokens.
        """
        if lengths is None:
            order = np.argsort(-self.length_scores(latents), axis=1, kind="stable")[:, : options.num_lengths]
            tried = order.T + 1
        else:
            tried = np.asarray(lengths)[None]
        masked = np.where(np.arange(int(tried.max(initial=1))) < tried[..., None], MASK, PAD)
        found = [
            self.fill(tokens, length, latents, options=options, on_step=None if number else on_step)
            for number, (tokens, length) in enumerate(zip(masked, tried, strict=True))
        ]
        sure = [np.log(np.maximum(each.scores, 1e-9)).sum(1) / each.lengths for each in found]
        best, rows = np.argmax(sure, axis=0), np.arange(len(latents))
        return Decoded(
            tokens=np.stack([each.tokens for each in found])[best, rows],
            lengths=tried[best, rows],
            scores=np.stack([each.scores for each in found])[best, rows],
        )

    def nats_per_token(
        self, tokens: NDArray[Any], lengths: NDArray[Any], latents: NDArray[Any], *, seed: int = 0
    ) -> float:
        """Return an upper bound on the negative log likelihood per token of texts of known lengths, given their vectors.

        Small sets are masked several times for a better estimate.
        """
        draws = -(-_NATS_ROWS // max(1, len(tokens)))
        inputs = (self._ids(tokens), self._ids(lengths), self._scaled(latents))
        batches = enumerate(zip(*(tensor.split(self.batch_size) for tensor in inputs), strict=True))
        total = 0.0
        with evaluating(self.model), torch.no_grad():
            for turn, (number, batch) in itertools.product(range(draws), batches):
                total += self.sum_of_nats(*batch, key=(seed, turn, number))
        return total / draws / max(1, int(np.sum(lengths)))

    def sum_of_nats(
        self, tokens: torch.Tensor, lengths: torch.Tensor, latents: torch.Tensor, *, key: tuple[int, ...]
    ) -> float:
        """Return an unbiased estimate of the bound, summed over texts; `latents` have unit variance.

        It is the cross entropy of masked tokens divided by the masked fraction, at one time per text.
        """
        drawn = draw(
            lengths.cpu().numpy().astype(np.int32),
            max_tokens=tokens.shape[1],
            dim=latents.shape[1],
            shares={"l2t": 1.0},
            key=key,
        )
        masked = torch.from_numpy(drawn.masked).to(tokens.device)
        time = torch.from_numpy(drawn.text_time).to(tokens.device)
        output = self.model(torch.where(masked, MASK, tokens), lengths, latents, time, torch.zeros_like(time))
        assert output.logits is not None, "the model was trained without predicting text"
        each = functional.cross_entropy(
            output.logits.float().transpose(1, 2), tokens.long(), reduction="none"
        )
        return float((each * masked / time[:, None]).sum())

    def fill(
        self,
        tokens: NDArray[Any],
        lengths: NDArray[Any],
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        on_step: OnStep | None = None,
    ) -> Decoded:
        """Fill in the masked tokens; return all tokens, each with its probability when it was chosen."""
        seeded = self._seeded(options.seed)

        def fill(tokens: torch.Tensor, lengths: torch.Tensor, latents: torch.Tensor) -> list[torch.Tensor]:
            at_first = (tokens == MASK).sum(1)
            scores = torch.ones(tokens.shape, device=self.device)
            for step in range(options.steps):
                logits = self._guided(tokens, lengths, latents, options.guidance)
                left = (at_first * (options.steps - 1 - step)) // options.steps
                tokens, opened, sure = unmask(
                    tokens, logits, left=left, temperature=options.temperature, seeded=seeded
                )
                scores = torch.where(opened, sure, scores)
                if on_step is not None:
                    on_step(step + 1, options.steps, tokens.cpu().numpy())
            return [tokens, scores]

        filled, scores = self._in_batches(fill, self._ids(tokens), self._ids(lengths), self._scaled(latents))
        return Decoded(tokens=filled, lengths=np.asarray(lengths), scores=scores)

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
        seeded = self._seeded(seed)

        def encode(tokens: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
            clean = noisy = self._noise(len(tokens), seeded)
            hidden = torch.where(tokens == PAD, PAD, MASK)
            for now, after in self._times(steps, rows=len(tokens)):
                clean = self._clean_of(self._predict(tokens, lengths, noisy, latent_time=now), noisy, now)
                if guidance != 1.0:
                    free = self._clean_of(self._predict(hidden, lengths, noisy, latent_time=now), noisy, now)
                    clean = free + guidance * (clean - free)
                clean, noisy = ddim_step(noisy, clean, now=now, after=after)
            return [functional.normalize(clean, dim=-1)]

        [found] = self._in_batches(encode, self._ids(tokens), self._ids(lengths))
        return found

    def generate(self, count: int, *, options: DecodeOptions, on_step: OnStep | None = None) -> Generated:
        """Generate texts and vectors together from noise. Lengths are drawn from the prediction of the length head."""
        seeded = self._seeded(options.seed)

        def generate(rows: torch.Tensor) -> list[torch.Tensor]:
            clean = noisy = self._noise(len(rows), seeded)
            size, _ = choose(self._length_chances(noisy).log(), temperature=1.0, seeded=seeded)
            lengths = size + 1
            places = torch.arange(int(lengths.max()), device=self.device)
            tokens = torch.where(places < lengths[:, None], MASK, PAD)
            for step, (now, after) in enumerate(self._times(options.steps, rows=len(rows))):
                output = self._predict(tokens, lengths, noisy, latent_time=now)
                clean, noisy = ddim_step(noisy, self._clean_of(output, noisy, now), now=now, after=after)
                left = (lengths * (options.steps - 1 - step)) // options.steps
                tokens, _, _ = unmask(
                    tokens, _logits_of(output), left=left, temperature=options.temperature, seeded=seeded
                )
                if on_step is not None:
                    on_step(step + 1, options.steps, tokens.cpu().numpy())
            tokens = functional.pad(tokens, (0, self.settings.max_tokens - tokens.shape[1]), value=PAD)
            return [tokens, lengths, functional.normalize(clean, dim=-1)]

        tokens, lengths, vectors = self._in_batches(generate, torch.arange(count))
        return Generated(tokens=tokens, lengths=lengths, vectors=vectors)

    def _in_batches(
        self, run: Callable[..., list[torch.Tensor]], *inputs: torch.Tensor
    ) -> list[NDArray[Any]]:
        """Call `run` with batches of the inputs, and return its concatenated results."""
        with evaluating(self.model), torch.no_grad():
            batches = zip(*(tensor.split(self.batch_size) for tensor in inputs), strict=True)
            found = [run(*batch) for batch in batches]
        return [torch.cat(parts).cpu().numpy() for parts in zip(*found, strict=True)]

    def _guided(
        self, tokens: torch.Tensor, lengths: torch.Tensor, latents: torch.Tensor, guidance: float
    ) -> torch.Tensor:
        logits = _logits_of(self._predict(tokens, lengths, latents))
        if guidance != 1.0:
            free = _logits_of(self._predict(tokens, lengths, latents, free=True))
            special = logits[..., :NUM_SPECIAL]  # minus infinity in both
            logits = free + guidance * (logits - free)
            logits[..., :NUM_SPECIAL] = special
        return logits

    def _predict(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        *,
        latent_time: torch.Tensor | None = None,
        free: bool = False,
    ) -> Output:
        """Run the model with the fraction of masked tokens as text time; latents are clean unless a time is given."""
        if latent_time is None:
            latent_time = torch.full((len(tokens),), 1.0 if free else 0.0, device=self.device)
        without = torch.full((len(tokens),), free, device=self.device)
        text_time = ((tokens == MASK).sum(1) / lengths).float()
        return self.model(tokens, lengths, latents, text_time, latent_time, without)

    def _clean_of(self, output: Output, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        assert output.latent is not None, "the model was trained without predicting latents"
        return to_clean(output.latent, noisy, time, self.settings.latent_parameterization)

    def _length_chances(self, scaled: torch.Tensor) -> torch.Tensor:
        blank = torch.full((len(scaled), 1), MASK, device=self.device)
        logits = self._predict(blank, torch.ones_like(blank[:, 0]), scaled).length
        assert logits is not None, "the model was trained without predicting text"
        return logits.softmax(-1)

    def _times(self, steps: int, *, rows: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        times = torch.linspace(1 - T_MIN, 0.0, steps + 1, device=self.device)
        return itertools.pairwise(times[:, None].expand(-1, rows))

    def _noise(self, rows: int, seeded: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, self.settings.latent_dim, generator=seeded, device=self.device)

    def _seeded(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _ids(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array, np.int64)).to(self.device)

    def _scaled(self, latents: NDArray[Any]) -> torch.Tensor:
        scaled = np.asarray(latents, np.float32) * np.float32(self.settings.latent_dim**0.5)
        return torch.from_numpy(scaled).to(self.device)


def load_sampler(folder: Path, settings: ModelSettings, *, device: torch.device) -> Sampler:
    """Load a sampler from a model folder, in fp32."""
    with torch.device("meta"):
        model = LatentDiffusionModel(settings)
    try:
        tensors = {name: read_tensor(place) for name, place in find_tensors(folder).items()}
    except SafetensorError as error:
        raise UserError(f"The weights of {folder} are damaged.", why=f"{error}.") from error
    check_fit(
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: tensor.numpy() for name, tensor in tensors.items()},
    )
    model.load_state_dict(tensors, assign=True)
    return Sampler(model.to(device, torch.float32).eval().requires_grad_(False))


def _logits_of(output: Output) -> torch.Tensor:
    """Return the logits in fp32, with -inf for the special tokens."""
    assert output.logits is not None, "the model was trained without predicting text"
    logits = output.logits.float()
    logits[..., :NUM_SPECIAL] = -torch.inf
    return logits


def unmask(
    tokens: torch.Tensor,
    logits: torch.Tensor,
    *,
    left: torch.Tensor,
    temperature: float,
    seeded: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fill in the most confident predictions until `left` tokens of each row remain masked.

    Return the tokens, a mask of the newly filled tokens, and the probability of each prediction.
    """
    masked = tokens == MASK
    chosen, sure = choose(logits, temperature=temperature, seeded=seeded)
    order = torch.where(masked, sure, -torch.inf).argsort(dim=1, descending=True).argsort(dim=1)
    opened = masked & (order < (masked.sum(1) - left)[:, None])
    return torch.where(opened, chosen, tokens), opened, sure


def choose(
    logits: torch.Tensor, *, temperature: float, seeded: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a token for each position, the likeliest or a sampled one, and its probability."""
    chances = (logits / (temperature or 1.0)).softmax(-1)
    if temperature:
        chosen = torch.multinomial(chances.flatten(0, -2), 1, generator=seeded).view(chances.shape[:-1])
    else:
        chosen = chances.argmax(-1)
    return chosen, chances.gather(-1, chosen[..., None])[..., 0]


def ddim_step(
    noisy: torch.Tensor, clean: torch.Tensor, *, now: torch.Tensor, after: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale predicted clean vectors to the norm of the training vectors inside the model, and move the noisy vectors
    towards them from time `now` to time `after`. Return both."""
    clean = functional.normalize(clean, dim=-1) * clean.shape[-1] ** 0.5
    alpha, sigma = signal_noise(now)
    next_alpha, next_sigma = signal_noise(after)
    return clean, next_alpha * clean + next_sigma * (noisy - alpha * clean) / sigma


def signal_noise(time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of the clean vector and of the noise, as columns."""
    angle = 0.5 * torch.pi * time.float()[:, None]
    return angle.cos(), angle.sin()


def to_clean(predicted: torch.Tensor, noisy: torch.Tensor, time: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the clean vector that corresponds to a prediction."""
    if kind == "x0":
        return predicted
    alpha, sigma = signal_noise(time)
    if kind == "v":
        return alpha * noisy - sigma * predicted
    return (noisy - sigma * predicted) / alpha.clamp(min=1e-3)
