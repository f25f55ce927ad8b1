"""Open a tokenized dataset, fit it to the context, and compute its statistics and identity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.read.columns import Columns, split_by_format
from crosstune.data.read.formats import WITHOUT_TURNS
from crosstune.data.read.sources import Source
from crosstune.data.tokens.encode import IN_MEMORY_BYTES, Encoder, OnProgress, digest, tokenize_source
from crosstune.data.tokens.store import JoinedStore, TokenStore
from crosstune.data.tokens.tokenizer import Tokenizer

PERCENTILES = (50, 90, 99)
# Spreads the place of a piece over the bits of a hash.
_PIECE_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Examples of a store, truncated to `limit` tokens."""

    store: TokenStore | JoinedStore
    kept: NDArray[np.int64]
    """The indices of the examples in the store."""
    limit: int
    form: str
    identity: str
    """sha256 of everything that determines the examples: contents, tokenizer, template, format, context, truncation."""
    dropped: int = 0
    """Examples skipped because they are longer than the limit."""
    pieces: NDArray[np.int64] | None = None
    """The first token of each piece of a split document, -1 for an example that is not split; None if none is."""

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, place: int) -> Example:
        number = int(self.kept[place])
        first = max(int(self.pieces[place]), 0) if self.pieces is not None else 0
        tokens, supervised = self.store.read(number, limit=self.limit, first=first)
        return Example(
            tokens=tokens,
            supervised=supervised,
            index=int(self.store.rows[number]),
            pictures=self.store.pictures_of(number),
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[place] for place in range(len(self)))

    def part(self, places: NDArray[np.int64] | slice) -> Corpus:
        pieces = None if self.pieces is None else self.pieces[places]
        return replace(self, kept=self.kept[places], pieces=pieces)

    @cached_property
    def stats(self) -> dict[str, Any]:
        """The statistics for `crosstune data`, plan.json, the page of the run and the trackers."""
        full, lengths = self.full_lengths(), self.lengths()
        tokens, supervised = int(lengths.sum()), int(self.num_supervised.sum())
        cut = int((full > self.limit).sum())
        percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf") if len(self) else ()
        return {
            "examples": len(self),
            "tokens": tokens,
            "supervised_tokens": supervised,
            "supervised_share": supervised / tokens if tokens else 0.0,
            **{f"length_p{name}": int(value) for name, value in zip(PERCENTILES, percentiles, strict=False)},
            "longest": int(lengths.max(initial=0)),
            "duplicates": len(self) - len(np.unique(self.hashes(shown=True))),
            "over_context": cut + self.dropped,
            "cut_examples": cut,
            "cut_tokens": int((full - lengths).sum()),
            "dropped_examples": self.dropped,
            **self._picture_stats(),
        }

    def picture_sizes(self) -> dict[int, list[tuple[int, int]]]:
        """Return the sizes of the pictures of the examples with pictures."""
        places = np.flatnonzero(self.store.picture_ends[self.kept]).tolist()
        return {
            place: [(one.width, one.height) for one in self.store.pictures_of(int(self.kept[place]))]
            for place in places
        }

    def _picture_stats(self) -> dict[str, Any]:
        """Return the number of pictures, their tokens and the range of their sizes; nothing for text."""
        found = [
            one
            for place in np.flatnonzero(self.store.picture_ends[self.kept]).tolist()
            for one in self.store.pictures_of(int(self.kept[place]))
        ]
        if not found:
            return {}
        sizes = sorted((one.width * one.height, f"{one.width} x {one.height}") for one in found)
        return {
            "pictures": len(found),
            "picture_tokens": sum(one.tokens for one in found),
            "smallest_picture": sizes[0][1],
            "largest_picture": sizes[-1][1],
            "animated_pictures": sum(one.animated for one in found),
        }

    def full_lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each example before truncation."""
        lengths = self.store.lengths()[self.kept]
        if self.pieces is None:
            return lengths
        return np.where(self.pieces < 0, lengths, np.minimum(lengths - self.pieces, self.limit))

    def lengths(self) -> NDArray[np.int64]:
        return np.minimum(self.full_lengths(), self.limit)

    @cached_property
    def num_supervised(self) -> NDArray[np.int64]:
        """The number of supervised tokens in each example."""
        counts = self.store.num_supervised_within(self.limit)[self.kept]
        # Documents carry loss everywhere, except on the first token of each piece.
        return counts if self.pieces is None else np.where(self.pieces < 0, counts, self.lengths() - 1)

    def hashes(self, *, shown: bool = False) -> NDArray[np.uint64]:
        """Return the hashes of the whole examples; if `shown`, of the tokens that training reads, without the tokens that
        are cut."""
        hashes = (self.store.shown_hashes if shown else self.store.hashes)[self.kept]
        if self.pieces is None:
            return hashes
        return hashes ^ (np.maximum(self.pieces, 0).astype(np.uint64) * _PIECE_FACTOR)

    def groups(self, *, by_prompt: bool, shown: bool) -> NDArray[np.int64]:
        """Return a number for each example: equal for duplicates and, on request, for examples with the same prompt. Unless
        `shown`, duplicates are whole examples, and prompts are not compared if a document is split."""
        hashes = self.hashes(shown=shown)
        same_text = np.unique(hashes, return_inverse=True)[1]
        if not by_prompt or (self.pieces is not None and not shown):
            return same_text
        prompts = self.store.prompts[self.kept]
        prompts = prompts if self.pieces is None else np.where(self.pieces < 0, prompts, hashes)
        same_prompt = np.unique(prompts, return_inverse=True)[1]
        found = same_prompt
        while True:
            before = found
            for same in (same_text, same_prompt):
                lowest = np.full(len(self), len(self), dtype=np.int64)
                np.minimum.at(lowest, same, found)
                found = lowest[same]
            if (found == before).all():
                return np.unique(found, return_inverse=True)[1]

    def without(self, seen: NDArray[np.uint64], *, shown: bool) -> Corpus:
        """Return the first of each set of equal examples, without those in `seen`."""
        hashes = self.hashes(shown=shown)
        first = np.zeros(len(self), dtype=np.bool_)
        first[np.unique(hashes, return_index=True)[1]] = True
        return self.part(np.flatnonzero(first & ~np.isin(hashes, seen)))

    def rows(self) -> NDArray[np.int64]:
        """Return the index of each example's row in the source."""
        return self.store.rows[self.kept]


def open_corpus(
    source: Source,
    tokenizer: Tokenizer,
    *,
    asked_format: str,
    whole: bool,
    context_length: int,
    truncation: str,
    limit: int = -1,
    columns: Columns | None = None,
    model_limit: int | None = None,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    progress: OnProgress | None = None,
    cut_long: bool = False,
    ways: Sequence[str] = ("cut", "drop", "split"),
    place: Callable[[int], str] | None = None,
) -> Corpus:
    """Tokenize a source, or its first `limit` rows unless that is -1. Its files may have different formats. `cut_long` cuts
    examples where they would raise an error because they are too long; the error names `ways`, values of --truncation, and the
    `place` of a row by its number from 1: its file and line, unless given."""
    corpora: list[Corpus] = []
    for uniform in split_by_format(source, asked=asked_format, columns=columns or {}):
        remaining = limit - sum(corpus.store.facts["rows"] for corpus in corpora) if limit != -1 else -1
        if remaining == 0:
            break
        store, decides = tokenize_source(
            uniform,
            Encoder(tokenizer=tokenizer, form=uniform.form, whole=whole),
            limit=remaining,
            in_memory_bytes=in_memory_bytes,
            progress=progress,
        )
        is_split = uniform.form in WITHOUT_TURNS and uniform.splits and truncation == "error"
        used = "split" if is_split else truncation
        fitted = fit_context(
            store,
            source=source.name,
            context_length=context_length,
            truncation="cut" if cut_long and used == "error" else used,
            form=uniform.form,
            identity=digest(decides | {"context": context_length, "truncation": used}),
            model_limit=model_limit,
            ways=ways,
            place=place or uniform.place,
        )
        corpora.append(fitted)
    return join_corpora(corpora)


def join_corpora(corpora: Sequence[Corpus]) -> Corpus:
    """Join corpora in order."""
    if len(corpora) == 1:
        return corpora[0]
    starts = np.cumsum([0, *(len(corpus.store) for corpus in corpora)])
    pieces = [
        corpus.pieces if corpus.pieces is not None else np.full(len(corpus), -1, dtype=np.int64)
        for corpus in corpora
    ]
    return Corpus(
        store=JoinedStore([corpus.store for corpus in corpora]),
        kept=np.concatenate([corpus.kept + start for corpus, start in zip(corpora, starts, strict=False)]),
        limit=corpora[0].limit,
        form=", ".join(dict.fromkeys(form for corpus in corpora for form in corpus.form.split(", "))),
        identity=digest([corpus.identity for corpus in corpora]),
        dropped=sum(corpus.dropped for corpus in corpora),
        pieces=np.concatenate(pieces) if any(corpus.pieces is not None for corpus in corpora) else None,
    )


def fit_context(
    store: TokenStore,
    *,
    source: str,
    context_length: int,
    truncation: str,
    form: str,
    identity: str,
    place: Callable[[int], str],
    model_limit: int | None = None,
    ways: Sequence[str] = ("cut", "drop", "split"),
) -> Corpus:
    """Return the examples of a store within the context. Longer examples raise a UserError, or are cut, dropped or split."""
    lengths = store.lengths()
    long = np.flatnonzero(lengths > context_length)
    kept = np.arange(len(store), dtype=np.int64)
    pieces = None
    others = [way for way in ways if way != truncation and (way != "split" or form in WITHOUT_TURNS)]
    if len(long) and (truncation == "error" or (truncation == "split" and form not in WITHOUT_TURNS)):
        longest = int(lengths.argmax())
        raise UserError(
            f"{len(long)} of {store.facts['rows']} rows of {source} are longer than the context of {context_length} tokens.",
            why=f"the longest, {place(int(store.rows[longest]) + 1)}, has {int(lengths[longest])} tokens.",
            do=how_to_fit(int(lengths[longest]), model_limit, ways=others),
        )
    if len(long) and truncation == "cut":
        store = store.cut(context_length)
        kept = np.flatnonzero((lengths <= context_length) | (store.picture_ends <= context_length))
    if len(long) and truncation == "split":
        kept, pieces = _split(lengths, context_length)
    if len(long) and truncation == "drop":
        kept = np.flatnonzero(lengths <= context_length)
    if not len(kept) and len(store):
        raise UserError(
            f"Every example of {source} is longer than {context_length} tokens.",
            why="pictures are never cut." if truncation == "cut" else "",
            do=how_to_fit(int(lengths.min()), model_limit, ways=others),
        )
    return Corpus(
        store=store,
        kept=kept,
        limit=context_length,
        form=form,
        identity=identity,
        dropped=len(store) - len(kept) if pieces is None else 0,
        pieces=pieces,
    )


def how_to_fit(needed: int, model_limit: int | None, *, ways: Sequence[str]) -> str:
    """Return what to do about examples of `needed` tokens; `ways` are the other values of --truncation."""
    listed = " or ".join([", ".join(ways[:-1]), ways[-1]] if ways[1:] else ways)
    passed = f"pass --truncation {listed}" if ways else "use shorter examples"
    if model_limit and needed > model_limit:
        return (
            f"{passed}: --context_length cannot be above {model_limit}, this model's maximum context length; --rope_scaling "
            f"yarn --rope_factor {-(-needed // model_limit)} trains it for longer rows"
        )
    return f"raise --context_length to {needed}" + (f", or {passed}" if ways else "")


def _split(lengths: NDArray[np.int64], context_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the example and the first token of each piece. A piece begins with the last token of the previous piece, so that
    every token except a document's first is predicted once."""
    step = context_length - 1
    counts = np.where(lengths > context_length, -(-(lengths - 1) // step), 1)
    kept = np.repeat(np.arange(len(lengths), dtype=np.int64), counts)
    number = np.arange(len(kept)) - np.repeat(np.cumsum(counts) - counts, counts)
    return kept, np.where(counts[kept] > 1, number * step, -1)
