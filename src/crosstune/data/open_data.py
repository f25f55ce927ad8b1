"""Open the data of a run: training examples, held-out examples, and the mixture of sources."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Tokenizing
from crosstune.data.batches.epoch_order import Mixture
from crosstune.data.named_datasets import DEFAULT_SAMPLES, DUMMY
from crosstune.data.preflight import drop_unsupervised
from crosstune.data.read.columns import (
    check_columns,
    parse_columns,
    pick_rows,
    renamed_columns,
    split_by_format,
)
from crosstune.data.read.dataset_list import parse_dataset, unweighted
from crosstune.data.read.files import FilePart, Row
from crosstune.data.read.sources import Source, open_source
from crosstune.data.tokens.corpus import Corpus, join_corpora, open_corpus
from crosstune.data.tokens.store import MemoryWriter
from crosstune.data.tokens.tokenizer import Tokenizer

HELD_OUT_SHARE = 0.1
_UNLIMITED = 2**40
# Separates the random streams of held-out rows and epochs; both use the same seed.
_HELD_OUT_KEY = 2**32


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The examples of a run or of one of its sources."""

    train: Corpus
    without_answer: int
    """Rows skipped because they have no supervised token."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Number of rows per outcome (trained, held_out, empty, ...); they add up to `read`."""
    skipped: Sequence[str] = ()
    """Rows that cannot be read, as JSON text: file, line and reason."""
    held_out: Corpus | None = None
    held_out_rows: Sequence[tuple[Row, str, Path | None]] = ()
    """The rows of the held-out examples, their formats and the folders of their files."""
    mixture: Mixture | None = None
    sources: Sequence[dict[str, Any]] = ()
    """The fraction of an epoch from each source."""
    notes: Sequence[str] = ()
    """Sentences about choices made while reading the data."""

    def identity(self) -> str:
        """Return the hash of everything that determines the examples, and their weights."""
        if self.mixture is None:
            return self.train.identity
        return hashlib.sha256(f"{self.train.identity} {self.mixture.identity()}".encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class _SourceData:
    """The examples of one source, before some are held out."""

    source: Source
    corpus: Corpus
    samples: int
    """The maximum number of training examples; -1: all."""
    most: int
    """The maximum number of held-out examples."""
    without_answer: int
    duplicates: int
    """Rows dropped by --dedup."""


@dataclass(frozen=True, kw_only=True)
class DataOpener:
    """Open the sources of a configuration."""

    config: Config
    tokenizer: Tokenizer
    observer: Observer
    model_limit: int | None
    """The model's maximum context length."""
    cut_long: bool = False
    """Cut examples that are too long instead of raising an error as training does, for a report about them."""

    def open(self) -> RunData:
        config = self.config
        entries = parse_dataset(config.dataset)
        sources = [self._source(entry.name) for entry in entries]
        if any(source.form == DUMMY for source in sources):
            return self._open_dummy(sources)
        columns = parse_columns(config.columns)
        check_columns(sources, columns)
        most = 0 if config.skip_eval or config.eval_dataset else self._max_held_out()
        shares = _divide(most, len(sources))
        held_out = [
            self._evaluated(source.own_held_out(), most=min(share, config.eval_samples))
            for source, share in zip(sources, shares, strict=True)
            if share and source.held_out
        ]
        if config.eval_dataset and config.eval_samples and not config.skip_eval:
            held_out = self._open_evaluation(config.eval_dataset)
        seen = [corpus.hashes(shown=self._across_sources) for corpus, _ in held_out]
        read: list[_SourceData] = []
        opened = []
        for number, (source, share) in enumerate(zip(sources, shares, strict=True)):
            read.append(self._read(source, most=share, seen=seen))
            known: list[Corpus | None] = [read[-1].corpus]
            if not self._across_sources:
                opened.append(self._divide_rows(read[-1], _draw(read[-1:], config, first=number)[0]))
                known = [opened[-1].train, opened[-1].held_out]
            if config.dedup:
                seen += [one.hashes(shown=self._across_sources) for one in known if one is not None]
        if self._across_sources:
            opened = list(map(self._divide_rows, read, _draw(read, config)))
        held_out += [(one.held_out, one.held_out_rows) for one in opened if one.held_out is not None]
        mixture = None
        if len(entries) > 1 and all(entry.weight is not None for entry in entries):
            mixture = Mixture(
                sizes=tuple(len(one.train) for one in opened),
                weights=tuple(entry.weight for entry in entries if entry.weight is not None),
            )
        described = _describe_sources(sources, opened, mixture) if len(sources) > 1 else []
        notes = self._notes(sources, opened)
        if mixture is not None:
            notes += [
                f"{source['name']}: {source['share']:.1%} of an epoch, {source['rows_per_epoch']:,} rows, "
                f"{source['passes_per_epoch']:.2f} times its {source['examples']:,} examples"
                for source in described
            ]
        corpora = [*(one.train for one in opened), *(corpus for corpus, _ in held_out)]
        return RunData(
            train=join_corpora([one.train for one in opened]),
            without_answer=sum(one.without_answer for one in opened),
            rows={name: sum(one.rows[name] for one in opened) for name in opened[0].rows},
            skipped=list(dict.fromkeys(row for one in corpora for row in one.store.facts["skipped_rows"])),
            held_out=join_corpora([corpus for corpus, _ in held_out]) if held_out else None,
            held_out_rows=[row for _, rows in held_out for row in rows],
            mixture=mixture,
            sources=described,
            notes=notes,
        )

    def _open_dummy(self, sources: Sequence[Source]) -> RunData:
        """Return random tokens, all supervised, that depend only on the vocabulary size."""
        config = self.config
        if len(sources) > 1:
            raise UserError(f"The {DUMMY} dataset cannot be combined with others.", do=f"use {DUMMY} alone")
        num_examples = DEFAULT_SAMPLES if config.dataset_samples == -1 else config.dataset_samples
        length, vocabulary = config.context_length, self.tokenizer.rust.get_vocab_size()
        writer = MemoryWriter()
        for index in range(num_examples):
            random = np.random.Generator(np.random.Philox(key=(0, index)))
            tokens = random.integers(0, vocabulary, size=length, dtype=np.int32)
            writer.append(tokens, np.ones(length, dtype=np.bool_), row=index)
        counts = dict.fromkeys(("empty", "unlocated_answers", "without_reasoning", "bad_rows"), 0) | {
            "rows": num_examples
        }
        names = {
            name: list[str]()
            for name in ("unused_columns", "ignored_by_template", "joined_tokens", "skipped_rows")
        }
        corpus = Corpus(
            store=writer.to_store(counts | names),
            kept=np.arange(num_examples, dtype=np.int64),
            limit=length,
            form=DUMMY,
            identity=hashlib.sha256(f"{DUMMY} {num_examples} {length} {vocabulary}".encode()).hexdigest(),
        )
        return RunData(train=corpus, without_answer=0)

    def _source(self, name: str, *, needs_training: bool = True) -> Source:
        source = open_source(name, needs_training=needs_training)
        return replace(source, skips_bad=self.config.skip_bad_rows)

    def _max_held_out(self) -> int:
        """Return the maximum number of held-out examples: --eval_fraction alone has no other limit."""
        config = self.config
        is_limited = config.eval_fraction is None or "eval_samples" in config.sources
        return config.eval_samples if is_limited or not config.eval_samples else _UNLIMITED

    @property
    def _across_sources(self) -> bool:
        """True if rows are compared as they are trained on, across all sources; older runs compare whole rows within each
        source."""
        return self.config.data_rules > 2

    def _read(self, source: Source, *, most: int, seen: Sequence[NDArray[np.uint64]]) -> _SourceData:
        """Return the examples of a source, of which at most `most` are held out; none if the source has a held-out split.
        With --dedup, examples in `seen` are dropped."""
        config = self.config
        samples = source.samples if config.dataset_samples == -1 else config.dataset_samples
        fraction = HELD_OUT_SHARE if config.eval_fraction is None else config.eval_fraction
        if source.held_out:
            most = 0
        reserved = 0 if samples == -1 else most
        if config.eval_fraction is not None:
            reserved = min(reserved, math.ceil(max(samples, 0) * fraction / (1 - fraction)))
        corpus, without_answer = self._corpus(source, limit=samples + reserved)
        num_rows = len(np.unique(corpus.rows()))
        if config.dedup:
            corpus = corpus.without(
                np.concatenate([*seen, np.empty(0, dtype=np.uint64)]), shown=self._across_sources
            )
            if not len(corpus):
                raise UserError(
                    f"Every row of {source.name} is a duplicate of a held-out row or of a row in an earlier source.",
                    do="remove the source, or remove --dedup",
                )
        return _SourceData(
            source=source,
            corpus=corpus,
            samples=samples,
            most=min(most, int(len(corpus) * fraction)),
            without_answer=without_answer,
            duplicates=num_rows - len(np.unique(corpus.rows())),
        )

    def _divide_rows(self, read: _SourceData, chosen: NDArray[np.int64]) -> RunData:
        """Return the training examples of a source, and the chosen examples as held-out data."""
        corpus, facts = read.corpus, read.corpus.store.facts
        places = np.setdiff1d(np.arange(len(corpus)), chosen, assume_unique=True)
        held_out = corpus.part(chosen) if len(chosen) else None
        train = corpus.part(places[_first(read.samples)])
        trained = np.unique(train.rows())
        counts = {
            "trained": len(trained),
            "held_out": len(np.setdiff1d(held_out.rows(), trained)) if held_out is not None else 0,
            "empty": facts["empty"],
            "without_answer": read.without_answer,
            "too_long": corpus.dropped,
            "duplicates": read.duplicates,
            "bad": facts["bad_rows"],
        }
        counts["unused"] = facts["rows"] - sum(counts.values())
        return RunData(
            train=train,
            without_answer=read.without_answer,
            rows={"read": facts["rows"], **counts},
            held_out=held_out,
            held_out_rows=self._rows(read.source, held_out) if held_out is not None else (),
        )

    def _open_evaluation(self, names: str) -> list[tuple[Corpus, Sequence[tuple[Row, str, Path | None]]]]:
        """Open the sources of --eval_dataset; their own held-out split if they have one."""
        entries = unweighted(names, option="eval_dataset")
        opened = []
        for entry, most in zip(entries, _divide(self.config.eval_samples, len(entries)), strict=True):
            source = self._source(entry.name, needs_training=False)
            if most:
                opened.append(
                    self._evaluated(source.own_held_out() if source.held_out else source, most=most)
                )
        return opened

    def _evaluated(
        self, source: Source, *, most: int
    ) -> tuple[Corpus, Sequence[tuple[Row, str, Path | None]]]:
        corpus = self._corpus(source, limit=most)[0].part(_first(most))
        if self.config.dedup:
            corpus = corpus.without(np.empty(0, dtype=np.uint64), shown=self._across_sources)
        return corpus, self._rows(source, corpus)

    def _rows(self, source: Source, corpus: Corpus) -> list[tuple[Row, str, Path | None]]:
        return pick_rows(self._uniform(source), corpus.rows().tolist())

    def _uniform(self, source: Source) -> list[Source]:
        config = self.config
        return split_by_format(source, asked=config.dataset_format, columns=parse_columns(config.columns))

    def _corpus(self, source: Source, *, limit: int) -> tuple[Corpus, int]:
        """Return the examples of a source that have supervised tokens, and the number of examples without any."""
        config = self.config

        def show(done: int, total: int, examples: int) -> None:
            progress = Tokenizing(source=source.name, done_bytes=done, total_bytes=total, examples=examples)
            self.observer.on_event(progress)

        corpus = open_corpus(
            source,
            self.tokenizer,
            asked_format=config.dataset_format,
            whole=config.train_on_prompt,
            context_length=config.context_length,
            truncation=config.truncation,
            limit=limit,
            columns=parse_columns(config.columns),
            model_limit=self.model_limit,
            progress=show,
            cut_long=self.cut_long,
        )
        return drop_unsupervised(corpus, source=source.name)

    def _notes(self, sources: Sequence[Source], opened: Sequence[RunData]) -> list[str]:
        uniform = [one for source in sources for one in self._uniform(source)]
        parts = [part for source in sources for part in (*source.parts, *source.held_out)]
        notes = [remark for part in parts if isinstance(part, FilePart) and (remark := part.remark())]
        notes += renamed_columns(uniform, parse_columns(self.config.columns))
        for source, one in zip(sources, opened, strict=True):
            if source.unused:
                notes.append(f"{source.name}: held out by name and not read: {', '.join(source.unused)}")
            if one.train.pieces is not None and (num_pieces := int((one.train.pieces >= 0).sum())):
                notes.append(
                    f"{source.name}: long documents are split into {num_pieces:,} pieces of at most {one.train.limit:,} tokens"
                )
        return notes


def _draw(read: Sequence[_SourceData], config: Config, *, first: int = 0) -> list[NDArray[np.int64]]:
    """Return the positions of the examples to hold out of each source; numbering starts at `first`. Examples with the same
    text or prompt stay together, in all sources; if the prompts of a source are too frequent, only those with the same text."""
    rules, most = config.data_rules, np.array([one.most for one in read])
    if not most.any():
        return [np.empty(0, dtype=np.int64) for _ in read]
    keys = [(config.seed, _HELD_OUT_KEY + first + number) for number in range(len(read))]
    draws = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
    joined = join_corpora([one.corpus for one in read])
    bounds = np.cumsum([len(one.corpus) for one in read])[:-1]
    short = np.ones(len(read), dtype=np.bool_)
    for by_prompt in (True, False):
        if by_prompt or rules < 3:
            held_out, left = np.zeros(len(joined), dtype=np.bool_), most.copy()
        groups = joined.groups(by_prompt=by_prompt, shown=rules > 2) if rules > 1 else np.arange(len(joined))
        sizes = np.stack([np.bincount(own, minlength=groups.max() + 1) for own in np.split(groups, bounds)])
        if sizes.shape[1] == len(joined) and not held_out.any():  # no duplicates
            drawn = zip(draws, read, strict=True)
            return [np.sort(draw.choice(len(one.corpus), one.most, replace=False)) for draw, one in drawn]
        chosen = np.zeros(sizes.shape[1], dtype=np.bool_)
        chosen[groups[held_out]] = True
        for number in np.flatnonzero(short):
            own = np.flatnonzero(sizes[number])
            for group in own[draws[number].permutation(len(own))]:
                if not chosen[group] and (sizes[:, group] <= left).all():
                    chosen[group] = True
                    left -= sizes[:, group]
                if not left[number]:
                    break
        held_out = chosen[groups]
        # Prompts of other sources do not count: a smaller evaluation is better than a leak.
        small = np.where(sizes <= most[:, None], sizes, 0).sum(axis=1)
        short = 2 * (most - small if rules > 2 else left) > most
        if not short.any():
            break
    return [np.flatnonzero(own) for own in np.split(held_out, bounds)]


def _describe_sources(
    sources: Sequence[Source], opened: Sequence[RunData], mixture: Mixture | None
) -> list[dict[str, Any]]:
    """Return the fraction of an epoch from each source."""
    sizes = [len(one.train) for one in opened]
    counts = mixture.counts() if mixture is not None else sizes
    return [
        {
            "name": source.name,
            "examples": size,
            "rows_per_epoch": count,
            "share": count / sum(counts),
            "passes_per_epoch": count / size,
        }
        for source, size, count in zip(sources, sizes, counts, strict=True)
    ]


def _divide(total: int, num_parts: int) -> list[int]:
    """Divide a number into parts that differ by at most one."""
    return [total // num_parts + (place < total % num_parts) for place in range(num_parts)]


def _first(samples: int) -> slice:
    return slice(0, samples if samples != -1 else None)
