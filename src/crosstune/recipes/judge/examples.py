"""Tokenize items: whole conversations with shared labels for training, and prompts for judging."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.data.batches import pad_rows
from crosstune.data.corpus import Corpus, open_corpus
from crosstune.data.encode import OnProgress
from crosstune.data.named_datasets import RowsPart
from crosstune.data.sources import Source
from crosstune.data.token_batch import Example, IntArray, TokenBatch
from crosstune.data.tokenizer import Tokenizer
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.label_tokens import LabelTokens
from crosstune.recipes.judge.prompts import Messages, open_messages, training_messages
from crosstune.recipes.judge.verdicts import VerdictFormat


@dataclass(frozen=True, kw_only=True)
class JudgeBatch(TokenBatch):
    """Rows with soft targets: position t predicts `targets[:, t]` with the share 1 - `shares[:, t]`, and `others[:, t]`
    with the rest."""

    others: IntArray
    shares: NDArray[np.float32]
    scores: NDArray[np.float32]
    """The score of each row as a fraction of the scale."""
    ends: IntArray
    """The last token of each prompt, before the verdict."""
    by_rows: bool = False
    """True if the loss is a sum over rows (scalar head)."""

    @property
    def weight(self) -> int:
        return len(self.scores) if self.by_rows else super().weight


@dataclass(frozen=True, kw_only=True)
class SoftLabel:
    """The position of a label, and the other label that shares its probability."""

    place: int
    other: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ItemCorpus:
    """Tokenized items that fit into the context."""

    corpus: Corpus
    items: Sequence[Item]
    """In the order of the corpus."""
    soft: Sequence[SoftLabel | None]
    """The soft label of each example; None if it has a single label."""
    targets: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.corpus)

    def batch(self, places: Sequence[int], *, pad_id: int, by_rows: bool = False) -> JudgeBatch:
        rows = [self.corpus[place] for place in places]
        plain = pad_rows(rows, pad_id=pad_id)
        others, shares = plain.targets.copy(), np.zeros(plain.targets.shape, dtype=np.float32)
        for row, place in enumerate(places):
            soft = self.soft[place]
            if soft is not None:
                others[row, soft.place - 1] = soft.other
                shares[row, soft.place - 1] = soft.share
        return JudgeBatch(
            **{field.name: getattr(plain, field.name) for field in dataclasses.fields(TokenBatch)},
            others=others,
            shares=shares,
            scores=self.targets[list(places)],
            ends=np.array([int(row.supervised.argmax()) - 1 for row in rows], dtype=np.int32),
            by_rows=by_rows,
        )

    def ordered(self, places: NDArray[np.int64]) -> ItemCorpus:
        """Return the examples at these places, in their order."""
        chosen = places.tolist()
        return ItemCorpus(
            corpus=self.corpus.part(places),
            items=[self.items[place] for place in chosen],
            soft=[self.soft[place] for place in chosen],
            targets=self.targets[places],
        )

    def identity(self) -> str:
        sha = hashlib.sha256(self.corpus.hashes().astype("<u8").tobytes())
        sha.update(self.corpus.num_supervised.astype("<i8").tobytes())
        sha.update(self.targets.astype("<f4").tobytes())
        sha.update(repr([(s.place, s.other, s.share) if s else None for s in self.soft]).encode())
        return sha.hexdigest()


def encode_items(
    items: Sequence[Item],
    *,
    verdict: VerdictFormat,
    tokens: LabelTokens,
    tokenizer: Tokenizer,
    config: Config,
    name: str,
    model_limit: int | None,
    progress: OnProgress | None = None,
) -> ItemCorpus:
    """Tokenize whole conversations. A score between two labels becomes a soft label, unless --soft_scores false."""
    corpus = _corpus(
        [training_messages(item, verdict) for item in items],
        tokenizer,
        name=name,
        context_length=config.context_length,
        truncation=config.truncation,
        model_limit=model_limit,
        progress=progress,
    )
    kept = [items[place] for place in corpus.rows().tolist()]
    soft = [
        soft_label(item, corpus[place], verdict=verdict, tokens=tokens) if config.soft_scores else None
        for place, item in enumerate(kept)
    ]
    return ItemCorpus(
        corpus=corpus,
        items=kept,
        soft=soft,
        targets=np.array([_target(item, verdict) for item in kept], np.float32),
    )


def encode_prompts(
    items: Sequence[Item], *, verdict: VerdictFormat, tokens: LabelTokens, tokenizer: Tokenizer
) -> list[list[int]]:
    """Return the tokens of each item up to its label, rendered exactly as in training."""
    label = verdict.labels.texts[0]
    corpus = _corpus(
        [open_messages(item, verdict, label=label) for item in items],
        tokenizer,
        name="the items to judge",
        context_length=2**24,
        truncation="error",
        model_limit=None,
    )
    prompts = []
    for example in corpus:
        place = tokens.place_in(example.tokens, example.supervised)
        assert place > 0, "a verdict that we wrote has its label where we look for it"
        prompts.append(example.tokens[:place].tolist())
    return prompts


def soft_label(
    item: Item, example: Example, *, verdict: VerdictFormat, tokens: LabelTokens
) -> SoftLabel | None:
    """Return the soft label at the first token where the two labels differ; None where the score is on a label."""
    if item.score is None:
        return None
    nearest, other, share = verdict.labels.neighbours(item.score)
    place = tokens.place_in(example.tokens, example.supervised)
    first, second = tokens.sequences[nearest], tokens.sequences[other]
    same = next(length for length, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    written = tuple(example.tokens[place : place + same + 1].tolist())
    if not share or place < 1 or written != first[: same + 1]:  # the data's own verdict may differ
        return None
    return SoftLabel(place=place + same, other=second[same], share=share)


def _target(item: Item, verdict: VerdictFormat) -> float:
    if item.score is not None:
        return verdict.scale.normalized(item.score)
    return {"A": 1.0, "B": 0.0}.get(item.winner or "", 0.5)


def _corpus(
    conversations: Sequence[Messages],
    tokenizer: Tokenizer,
    *,
    name: str,
    progress: Any = None,
    **options: Any,
) -> Corpus:
    rows = [{"messages": messages} for messages in conversations]
    source = Source(name=name, parts=(RowsPart(name=name, loaded=rows),), form="messages")
    return open_corpus(source, tokenizer, asked_format="messages", whole=False, progress=progress, **options)
