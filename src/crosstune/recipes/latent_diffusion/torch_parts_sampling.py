"""Sample from a latent-diffusion model: texts from vectors, vectors from texts, or both from noise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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
        with self._evaluating():
            found = [self._length_chances(self._scaled(latents[part])) for part in self._parts(len(latents))]
        return torch.cat(found).cpu().numpy()

    def decode(
        self,
        latents: NDArray[Any],
        *,
        options: DecodeOptions,
        lengths: NDArray[Any] | None = None,
        on_step: OnStep | None = None,
    ) -> Decoded:
        """Decode vectors of norm 1 from fully masked text, of the likeliest lengths or the given ones."""
        if lengths is None:
            order = np.argsort(-self.length_scores(latents), axis=1, kind="stable")[:, : options.num_lengths]
            tried = list(order.T + 1)
        else:
            tried = [np.asarray(lengths)]
        best: Decoded | None = None
        for length in tried:
            real = np.arange(int(length.max(initial=1))) < length[:, None]
            shown = on_step if best is None else None
            found = self.fill(np.where(real, MASK, PAD), length, latents, options=options, on_step=shown)
            best = found if best is None else _more_confident(best, found)
        assert best is not None
        return best

    def nats_per_token(
        self, tokens: NDArray[Any], lengths: NDArray[Any], latents: NDArray[Any], *, seed: int = 0
    ) -> float:
        """Return an upper bound on the negative log likelihood per token of texts of known lengths, given their vectors.

        Small sets are masked several times for a better estimate.
        """
        draws = -(-_NATS_ROWS // max(1, len(tokens)))
        total = 0.0
        with self._evaluating():
            for turn, (number, part) in itertools.product(range(draws), enumerate(self._parts(len(tokens)))):
                total += self.sum_of_nats(
                    self._ids(tokens[part]),
                    self._ids(lengths[part]),
                    self._scaled(latents[part]),
                    key=(seed, turn, number),
                )
        return total / draws / max(1, int(np.sum(lengths)))

    def sum_of_nats(
        self, tokens: torch.Tensor, lengths: torch.Tensor, latents: torch.Tensor, *, key: tuple[int, ...]
    ) -> float:
        """Return an unbiased estimate of the bound, summed over texts.

        It is the cross entropy of masked tokens divided by the masked fraction, at one time per text. `latents` have unit
        variance.
        """
        drawn = draw(
            lengths.cpu().numpy().astype(np.int32),
            max_tokens=tokens.shape[1],
            dim=latents.shape[1],
            shares={"l2t": 1.0},
            dropped=0.0,
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
        filled, scores, seeded = [], [], self._seeded(options.seed)
        with self._evaluating():
            for part in self._parts(len(tokens)):
                done = self._fill(
                    self._ids(tokens[part]),
                    self._ids(lengths[part]),
                    self._scaled(latents[part]),
                    options=options,
                    seeded=seeded,
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
        found, seeded = [], self._seeded(seed)
        with self._evaluating():
            for part in self._parts(len(tokens)):
                rows, size = self._ids(tokens[part]), self._ids(lengths[part])
                clean = self._ddim(rows, size, steps=steps, guidance=guidance, seeded=seeded)
                found.append(functional.normalize(clean, dim=-1).cpu().numpy())
        return np.concatenate(found)

    def generate(self, count: int, *, options: DecodeOptions, on_step: OnStep | None = None) -> Generated:
        """Generate texts and vectors together from noise. Lengths are drawn from the prediction of the length head."""
        tokens, lengths, vectors = [], [], []
        seeded = self._seeded(options.seed)
        with self._evaluating():
            for part in self._parts(count):
                noise = self._noise(len(range(count)[part]), seeded)
                size, _ = choose(self._length_chances(noise).log(), temperature=1.0, seeded=seeded)
                found = self._generate(noise, size + 1, options=options, seeded=seeded, on_step=on_step)
                tokens.append(
                    functional.pad(found[0], (0, self.settings.max_tokens - found[0].shape[1]), value=PAD)
                )
                lengths.append(size + 1)
                vectors.append(functional.normalize(found[1], dim=-1))
        return Generated(
            tokens=torch.cat(tokens).cpu().numpy(),
            lengths=torch.cat(lengths).cpu().numpy(),
            vectors=torch.cat(vectors).cpu().numpy(),
        )

    def _fill(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        latents: torch.Tensor,
        *,
        options: DecodeOptions,
        seeded: torch.Generator,
        on_step: OnStep | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Unmask about the same number of tokens in each step."""
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
        return tokens, scores

    def _generate(
        self,
        noisy: torch.Tensor,
        lengths: torch.Tensor,
        *,
        options: DecodeOptions,
        seeded: torch.Generator,
        on_step: OnStep | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(int(lengths.max()), device=self.device)
        tokens = torch.where(places < lengths[:, None], MASK, PAD)
        clean = noisy
        for step, (now, after) in enumerate(itertools.pairwise(self._times(options.steps))):
            time = now.expand(len(tokens))
            output = self._predict(tokens, lengths, noisy, latent_time=time)
            clean = at_data_norm(self._clean_of(output, noisy, time))
            noisy = ddim_step(noisy, clean, now=time, after=after.expand(len(tokens)))
            left = (lengths * (options.steps - 1 - step)) // options.steps
            tokens, _, _ = unmask(
                tokens, _logits_of(output), left=left, temperature=options.temperature, seeded=seeded
            )
            if on_step is not None:
                on_step(step + 1, options.steps, tokens.cpu().numpy())
        return tokens, clean

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

    def _ddim(
        self,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        *,
        steps: int,
        guidance: float,
        seeded: torch.Generator,
    ) -> torch.Tensor:
        clean = noisy = self._noise(len(tokens), seeded)
        hidden = torch.where(tokens == PAD, PAD, MASK)
        for now, after in itertools.pairwise(self._times(steps)):
            time = now.expand(len(tokens))
            clean = self._clean_of(self._predict(tokens, lengths, noisy, latent_time=time), noisy, time)
            if guidance != 1.0:
                free = self._clean_of(self._predict(hidden, lengths, noisy, latent_time=time), noisy, time)
                clean = free + guidance * (clean - free)
            clean = at_data_norm(clean)
            noisy = ddim_step(noisy, clean, now=time, after=after.expand(len(tokens)))
        return clean

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
        output: Output = self.model(tokens, lengths, latents, text_time, latent_time, without)
        return output

    def _clean_of(self, output: Output, noisy: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        assert output.latent is not None, "the model was trained without predicting latents"
        return to_clean(output.latent, noisy, time, self.settings.latent_parameterization)

    def _length_chances(self, scaled: torch.Tensor) -> torch.Tensor:
        blank = torch.full((len(scaled), 1), MASK, device=self.device)
        logits = self._predict(blank, torch.ones_like(blank[:, 0]), scaled).length
        assert logits is not None, "the model was trained without predicting text"
        return logits.softmax(-1)

    def _times(self, steps: int) -> torch.Tensor:
        return torch.linspace(1 - T_MIN, 0.0, steps + 1, device=self.device)

    def _noise(self, rows: int, seeded: torch.Generator) -> torch.Tensor:
        return torch.randn(rows, self.settings.latent_dim, generator=seeded, device=self.device)

    def _seeded(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _ids(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(array, np.int64)).to(self.device)

    def _scaled(self, latents: NDArray[Any]) -> torch.Tensor:
        scaled = np.asarray(latents, np.float32) * np.float32(self.settings.latent_dim**0.5)
        return torch.from_numpy(scaled).to(self.device)

    def _parts(self, rows: int) -> Iterator[slice]:
        yield from (slice(start, start + self.batch_size) for start in range(0, rows, self.batch_size))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with evaluating(self.model), torch.no_grad():
            yield


def _more_confident(one: Decoded, other: Decoded) -> Decoded:
    """Return, for each row, the text with the higher mean log probability of its tokens."""
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


def load_sampler(folder: Path, settings: ModelSettings, *, device: torch.device, dtype: str) -> Sampler:
    """Load a sampler from a model folder."""
    with torch.device("meta"):
        model = LatentDiffusionModel(settings, compute_dtype=DTYPES[dtype])
    try:
        tensors = {name: read_tensor(place) for name, place in find_tensors(folder).items()}
    except SafetensorError as error:
        raise UserError(f"The weights of {folder} are damaged.", why=f"{error}.") from error
    check_fit(
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: tensor.numpy() for name, tensor in tensors.items()},
    )
    model.load_state_dict(tensors, assign=True)
    return Sampler(model.to(device, DTYPES[dtype]).eval().requires_grad_(False))


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

    Return the tokens, a mask of the newly filled ones, and the probability of each prediction.
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
) -> torch.Tensor:
    """Move noisy vectors from time `now` to time `after`, towards the predicted clean vectors."""
    alpha, sigma = signal_noise(now)
    next_alpha, next_sigma = signal_noise(after)
    return next_alpha * clean + next_sigma * (noisy - alpha * clean) / sigma


def at_data_norm(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors to the norm of the training vectors inside the model."""
    return functional.normalize(vectors, dim=-1) * vectors.shape[-1] ** 0.5


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
