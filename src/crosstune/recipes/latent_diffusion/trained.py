"""Open a trained latent-diffusion model for decoding, encoding and evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.paths import missing_run
from crosstune.recipes.latent_diffusion.encoders import UNRECORDED, Encoder, open_encoder_of
from crosstune.recipes.latent_diffusion.pair_folder import PairFolder, load_array, normalise_vectors
from crosstune.recipes.latent_diffusion.settings import SETTINGS, ModelSettings, load_settings
from crosstune.recipes.latent_diffusion.vocabulary import Vocabulary, load_vocabulary

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from crosstune.recipes.latent_diffusion.settings import Decoded, DecodeOptions, OnStep
from crosstune.recipes.latent_diffusion.vocabulary import MASK, PAD

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler

_CANNOT = {
    "l2t": "decode vectors",
    "t2l": "encode texts",
    "unconditional": "make texts from noise",
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    folder: Path
    settings: ModelSettings
    facts: dict[str, Any]
    """The trained modes and the encoder's record."""
    vocabulary: Vocabulary
    sampler: Sampler

    def check_mode(self, needed: str) -> None:
        """Raise if the model was not trained for a mode. Unconditional training covers the other two as well."""
        modes = set(self.facts["modes"])
        if needed in modes or (needed != "unconditional" and "unconditional" in modes):
            return
        cannot, trained_with = _CANNOT[needed], " and ".join(sorted(modes))
        raise UserError(
            f"The model {self.folder} cannot {cannot}.",
            why=f"it was trained with --loss_type {trained_with} alone.",
            do=f"train one with --loss_type {needed} or random",
        )

    def tokens_of(self, texts: list[str]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the token ids and lengths of texts; raise for a text that is empty or too long."""
        rows = self.vocabulary.encode(texts)
        for text, length in zip(texts, rows.lengths.tolist(), strict=True):
            if not 1 <= length <= self.settings.max_tokens:
                raise UserError(
                    f"The text {text[:60]!r} has {length} tokens.",
                    why=f"the model reads 1 to {self.settings.max_tokens}.",
                    do="give a shorter text" if length else "give a text",
                )
        return rows.stack(width=self.settings.max_tokens), rows.lengths

    def vectors_of(self, path: Path) -> tuple[NDArray[Any], int]:
        """Return the normalised vectors of an .npy file, and how many had a different norm."""
        vectors = load_array(path)
        if vectors.ndim == 1:
            vectors = vectors[None]
        check_dim(vectors, self.settings.latent_dim, source=str(path))
        return normalise_vectors(vectors, source=str(path))

    def encoder(self, name: str | None = None, **options: Any) -> Encoder:
        """Open the encoder that the model was trained with."""
        return open_encoder_of(self.facts, encoder=name, **options)

    def can_embed(self, name: str | None = None) -> bool:
        """Return whether the encoder is known, so that decoded texts can be embedded again."""
        return name is not None or self.facts["encoder"].get("kind") not in UNRECORDED

    def check_data(self, pairs: PairFolder) -> None:
        """Raise unless pairs have the dimension, tokenizer and encoder of the model's training data."""
        check_dim(pairs.splits["train"].latents, self.settings.latent_dim, source=str(pairs.folder))
        if pairs.manifest["encoder"].get("sha256") != self.facts["encoder"].get("sha256"):
            raise UserError(
                f"The vectors of {pairs.folder} were not made by the model's encoder.",
                why=f"they come from {pairs.manifest['encoder'].get('name')}, and the model was trained with "
                f"{self.facts['encoder'].get('name')}.",
                do="build the pairs with the model's encoder",
            )
        if pairs.vocabulary.digest != self.vocabulary.digest:
            raise UserError(f"The tokenizer of {pairs.folder} is not the model's.")


def check_dim(vectors: NDArray[Any], dim: int, *, source: str) -> None:
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or vectors.shape[1] != dim:
        raise UserError(
            f"The vectors of {source} do not fit the model.",
            why=f"they are {vectors.dtype} {list(vectors.shape)}, and the model reads {dim} dimensions.",
            do="embed the texts with the encoder that the model was trained with",
        )


def open_trained(path: Path, *, device: str | None = None, dtype: str = "fp32") -> Trained:
    """Open a run of the recipe, or the model folder in it."""
    if not path.exists():
        raise missing_run(path)
    folder = path / "model" if (path / "model" / SETTINGS).is_file() else path
    if not (folder / SETTINGS).is_file():
        raise UserError(
            f"{path} holds no trained latent-diffusion model.",
            why=f"there is no {SETTINGS} in it.",
            do="give the folder of a finished run: crosstune train --recipe latent_diffusion",
        )
    settings, facts = load_settings(folder)
    if not isinstance(facts.get("encoder"), dict) or not isinstance(facts.get("modes"), list):
        raise UserError(f"{folder / SETTINGS} is incomplete.", why="it names no encoder or no modes.")
    from crosstune.recipes.latent_diffusion.torch_parts import choose_device
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import load_sampler

    return Trained(
        folder=folder,
        settings=settings,
        facts=facts,
        vocabulary=load_vocabulary(folder),
        sampler=load_sampler(folder, settings, device=choose_device(device), dtype=dtype),
    )


@dataclass(frozen=True, kw_only=True)
class CorrectOptions:
    rounds: int = 8
    candidates: int = 8
    """Proposals for each text in each round."""
    lengths: int = 4
    """Number of likely lengths to decode at first."""
    temperature: float = 0.8
    fill_steps: int = 4


@dataclass(kw_only=True)
class Best:
    """The best text of each row so far, with its cosine to the vector."""

    tokens: NDArray[Any]
    lengths: NDArray[Any]
    scores: NDArray[Any]
    cosine: NDArray[np.float32]


def correct_texts(
    sampler: Sampler,
    encoder: Encoder,
    vocabulary: Vocabulary,
    latents: NDArray[Any],
    *,
    options: DecodeOptions,
    correct: CorrectOptions,
    on_step: OnStep | None = None,
) -> Iterator[Best]:
    """Yield the texts nearest to the vectors, after decoding and after each round of correction.

    No reference is used: texts are compared by the cosine of their embedding and the vector.
    """
    random = np.random.default_rng(options.seed)
    count, width = len(latents), sampler.settings.max_tokens
    best = Best(
        tokens=np.zeros((count, width), np.int64),
        lengths=np.ones(count, np.int64),
        scores=np.zeros((count, width), np.float32),
        cosine=np.full(count, -2.0, np.float32),
    )
    order = np.argsort(-sampler.length_scores(latents), axis=1)[:, : correct.lengths] + 1
    for place in range(order.shape[1]):
        shown = on_step if place == 0 else None
        found = sampler.decode(latents, options=options, lengths=order[:, place], on_step=shown)
        _keep(best, found, np.arange(count), _cosines(encoder, vocabulary, found.tokens, latents))
    yield best
    for number in range(correct.rounds):
        share = 0.6 - 0.45 * number / max(1, correct.rounds - 1)
        tokens, lengths, rows = _propose(best, random, correct.candidates, share=share)
        fill = DecodeOptions(
            steps=correct.fill_steps,
            temperature=correct.temperature,
            guidance=options.guidance,
            seed=options.seed + number + 1,
        )
        found = sampler.fill(tokens, lengths, latents[rows], options=fill)
        _keep(best, found, rows, _cosines(encoder, vocabulary, found.tokens, latents[rows]))
        yield best


def _propose(
    best: Best, random: np.random.Generator, candidates: int, *, share: float
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return several copies of each text with about this share of tokens masked, mostly those of low probability; a
    third of the copies are one token shorter or longer."""
    rows = np.repeat(np.arange(len(best.lengths)), candidates)
    tokens, lengths, scores = best.tokens[rows].copy(), best.lengths[rows].copy(), best.scores[rows]
    kind, width = random.integers(6, size=len(rows)), tokens.shape[1]
    for row in np.nonzero(kind < 2)[0]:
        place, size = int(random.integers(lengths[row])), int(lengths[row])
        if kind[row] == 0 and size < width:
            tokens[row, place + 1 : size + 1] = tokens[row, place:size].copy()
            tokens[row, place] = MASK
            lengths[row] += 1
        elif kind[row] == 1 and size > 1:
            tokens[row, place : size - 1] = tokens[row, place + 1 : size].copy()
            tokens[row, size - 1] = PAD
            lengths[row] -= 1
    real = np.arange(width) < lengths[:, None]
    chance = share * (1.5 - np.clip(scores, 0, 1))
    masked = (random.random(tokens.shape) < chance) & real
    masked[np.arange(len(rows)), random.integers(lengths)] = True  # at least one
    tokens[masked] = MASK
    return tokens, lengths, rows


def _cosines(
    encoder: Encoder, vocabulary: Vocabulary, tokens: NDArray[Any], latents: NDArray[Any]
) -> NDArray[np.float32]:
    texts: Sequence[str] = vocabulary.decode_batch(tokens)
    different = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    vectors = encoder.encode(list(different))[[different[text] for text in texts]]
    cosines: NDArray[np.float32] = (vectors * np.asarray(latents, np.float32)).sum(-1)
    return cosines


def _keep(best: Best, found: Decoded, rows: NDArray[Any], cosines: NDArray[np.float32]) -> None:
    """Replace texts by candidates with a higher cosine."""
    width = found.tokens.shape[1]
    order = np.argsort(cosines, kind="stable")  # the best of a row comes last and stays
    order = order[cosines[order] > best.cosine[rows[order]]]
    target = rows[order]
    best.tokens[target] = PAD
    best.tokens[target, :width] = found.tokens[order]
    best.scores[target, :width] = found.scores[order]
    best.lengths[target] = found.lengths[order]
    best.cosine[target] = cosines[order]
