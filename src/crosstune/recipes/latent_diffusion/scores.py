"""Score decoded texts and vectors: accuracy, BLEU, chrF, exact match, cosine and retrieval."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.sampling import DecodeOptions

if TYPE_CHECKING:
    from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler

RETRIEVAL_AMONG = 1000


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def require_sacrebleu() -> None:
    if not has_sacrebleu():
        raise UserError("BLEU and chrF need sacrebleu.", do="pip install 'crosstune[latents]'")


def text_scores(texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return BLEU and chrF, from 0 to 100, and the share of texts that equal their reference."""
    require_sacrebleu()
    import sacrebleu

    return {
        "bleu": float(sacrebleu.corpus_bleu(list(texts), [list(references)]).score),
        "chrf": float(sacrebleu.corpus_chrf(list(texts), [list(references)]).score),
        "exact_match": exact_match(texts, references),
    }


def exact_match(texts: Sequence[str], references: Sequence[str]) -> float:
    return float(np.mean([text == reference for text, reference in zip(texts, references, strict=True)]))


def token_accuracy(predicted: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]) -> float:
    """Return the share of correctly predicted tokens, without padding."""
    width = min(predicted.shape[1], tokens.shape[1])
    real = np.arange(width) < np.asarray(lengths)[:, None]
    right = (predicted[:, :width] == tokens[:, :width]) & real
    return float(right.sum() / max(1, int(np.asarray(lengths).sum())))


def one_shot_accuracy(
    sampler: Sampler, latents: NDArray[Any], tokens: NDArray[Any], lengths: NDArray[Any]
) -> float:
    """Return the token accuracy of one step from fully masked text of the right lengths."""
    found = sampler.decode(latents, options=DecodeOptions(steps=1), lengths=lengths)
    return token_accuracy(found.tokens, tokens, lengths)


def cosine(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return the mean cosine of pairs of vectors of norm 1."""
    return float((np.asarray(one, np.float32) * np.asarray(other, np.float32)).sum(-1).mean())


def retrieval(queries: NDArray[Any], keys: NDArray[Any], *, among: int = RETRIEVAL_AMONG) -> float:
    """Return how often a query's own key is the nearest, in groups of at most `among` keys."""
    hits = 0
    for start in range(0, len(queries), among):
        part = slice(start, start + among)
        near = np.asarray(queries[part], np.float32) @ np.asarray(keys[part], np.float32).T
        hits += int((near.argmax(1) == np.arange(len(near))).sum())
    return hits / max(1, len(queries))
