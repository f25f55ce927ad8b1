"""Open the preferences of a configuration: training and held-out rows without leaks, tokenized."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example
from crosstune.data.named_datasets import RowsPart
from crosstune.data.open_data import HELD_OUT_SHARE
from crosstune.data.read.columns import Columns, check_columns, parse_columns
from crosstune.data.read.dataset_list import unweighted
from crosstune.data.read.formats import Turn
from crosstune.data.read.sources import Source, open_source, row_error, skipped_row
from crosstune.data.tokens.corpus import Corpus, how_to_fit, open_corpus
from crosstune.data.tokens.encode import OnProgress
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.preference.batch import Group
from crosstune.recipes.preference.read_pairs import TARGETS, Preference, read_preferences

_SPLIT_KEY = 2**34
"""Separates the random stream of the split from other streams with the same seed."""


@dataclass(frozen=True, kw_only=True)
class PreferenceData:
    train: Sequence[Preference]
    held_out: Sequence[Preference]
    num_rows: int
    num_same: int = 0
    """Pairs dropped because both answers are the same."""
    skipped: Sequence[str] = ()
    """Rows that cannot be read, as JSON text: file, line and reason."""
    notes: Sequence[str] = ()


@dataclass(kw_only=True)
class _Reading:
    config: Config
    paired: bool
    num_rows: int = 0
    num_same: int = 0
    skipped: list[str] = field(default_factory=list)
    first_error: UserError | None = None
    """The error of the first skipped row, with its place."""

    def read(self, source: Source, *, limit: int) -> list[Preference]:
        """Return the preferences of a source, at most `limit` unless that is -1."""
        columns = parse_columns(self.config.columns, targets=TARGETS)
        check_columns([source], columns)
        source = replace(source, skips_bad=self.config.skip_bad_rows)
        found: list[Preference] = []
        for part, row, _ in _with_columns(source, columns).rows():
            if limit != -1 and len(found) >= limit:
                break
            self.num_rows += 1
            try:
                if row.error is not None:
                    raise row.error
                read = read_preferences(row.row, paired=self.paired, place=part.place(row.number))
            except UserError as error:
                found_error = error if row.error is not None else row_error(error, part, row.number)
                if not self.config.skip_bad_rows:
                    raise found_error from error
                self.first_error = self.first_error or found_error
                self.skipped.append(skipped_row(error, part, row.number))
                continue
            same = [one for one in read if len(one.answers) == 2 and one.answers[0] == one.answers[1]]
            self.num_same += len(same)
            found += [one for one in read if one not in same]
        return found


def _with_columns(source: Source, columns: Columns) -> Source:
    return replace(source, columns=tuple(columns.items())) if columns else source


def open_preferences(config: Config, *, paired: bool) -> PreferenceData:
    """Read the sources of --dataset and --eval_dataset; hold out a fraction of the prompts if there is no evaluation data."""
    reading, train, held_out = _Reading(config=config, paired=paired), [], []
    evaluates = not config.skip_eval and config.eval_samples > 0
    for entry in unweighted(config.dataset, option="dataset"):
        source = open_source(entry.name)
        train += reading.read(source, limit=config.dataset_samples)
        if source.held_out and evaluates and not config.eval_dataset:
            held_out += reading.read(source.own_held_out(), limit=config.eval_samples)
    if config.eval_dataset and evaluates:
        for entry in unweighted(config.eval_dataset, option="eval_dataset"):
            source = open_source(entry.name, needs_training=False)
            held_out += reading.read(
                source.own_held_out() if source.held_out else source, limit=config.eval_samples
            )
    if not train and reading.first_error is not None and not reading.num_same:
        raise reading.first_error
    if not train:
        raise UserError(
            f"The dataset {config.dataset} has no preference to learn from.",
            why=f"of {reading.num_rows} rows, {reading.num_same} have two equal answers and "
            f"{len(reading.skipped)} cannot be read.",
            do="add pairs of different answers",
        )
    notes = []
    if evaluates and not held_out:
        train, held_out = hold_out_prompts(train, config)
        if held_out:
            notes.append(f"{len(held_out)} rows are held out, with all rows of their prompts")
        else:
            notes.append(
                "no rows are held out, so nothing is evaluated: the rows of every prompt are more than --eval_fraction and "
                "--eval_samples allow; raise them, or pass --eval_dataset"
            )
    _check_labels(train, config, reading)
    return PreferenceData(
        train=train,
        held_out=held_out[: config.eval_samples] if config.eval_fraction is None else held_out,
        num_rows=reading.num_rows,
        num_same=reading.num_same,
        skipped=reading.skipped,
        notes=notes,
    )


def _check_labels(train: Sequence[Preference], config: Config, reading: _Reading) -> None:
    labels = {one.is_desirable for one in train}
    if None not in labels and len(labels) == 1:
        kind = "desirable" if labels == {True} else "undesirable"
        bad = ""
        if reading.first_error is not None:
            bad = f" {len(reading.skipped):,} rows cannot be read, the first: {reading.first_error.message}"
        raise UserError(
            f"Every answer of {config.dataset} is {kind}.",
            why=f"kto learns from the difference between desirable and undesirable answers.{bad}",
            do="add rows with the other label"
            + ("; or train on the answers with --recipe sft" if True in labels else ""),
        )


class _Asked(Protocol):
    """A row with a prompt."""

    @property
    def prompt(self) -> Sequence[Turn]: ...

    @property
    def tools(self) -> Sequence[Any] | None: ...


_One = TypeVar("_One", bound=_Asked)


def prompt_key(one: _Asked) -> str:
    return json.dumps([one.prompt, one.tools], sort_keys=True, default=str)


def hold_out_prompts(found: Sequence[_One], config: Config) -> tuple[list[_One], list[_One]]:
    """Hold out a fraction of the rows at random, whole prompts at a time."""
    keys = [prompt_key(one) for one in found]
    names, groups = np.unique(keys, return_inverse=True)
    fraction = HELD_OUT_SHARE if config.eval_fraction is None else config.eval_fraction
    most = int(len(found) * fraction)
    if config.eval_fraction is None or "eval_samples" in config.sources:
        most = min(most, config.eval_samples)
    sizes, left, chosen = np.bincount(groups), most, set[int]()
    draw = np.random.Generator(np.random.Philox(key=(config.seed, _SPLIT_KEY)))
    for group in draw.permutation(len(names)):
        if sizes[group] <= left and len(chosen) + 1 < len(names):
            chosen.add(int(group))
            left -= int(sizes[group])
    held = [int(group) in chosen for group in groups]
    return (
        [one for one, out in zip(found, held, strict=True) if not out],
        [one for one, out in zip(found, held, strict=True) if out],
    )


@dataclass(frozen=True, kw_only=True)
class PreferenceCorpus:
    """Tokenized preferences whose answers fit into the context."""

    corpus: Corpus
    """A row for each answer."""
    preferences: Sequence[Preference]
    first: NDArray[np.int64]
    """The first row of each preference in the corpus."""
    num_too_long: int = 0
    num_cut: int = 0
    """Preferences with a truncated answer."""

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the answers, with preferences that are cut or dropped instead of examples."""
        sides = [np.arange(len(one.answers)) for one in self.preferences]
        places = np.concatenate([first + side for first, side in zip(self.first, sides, strict=True)])
        counts = {"cut_examples": self.num_cut, "dropped_examples": self.num_too_long}
        return self.corpus.part(places).stats | counts | {"over_context": sum(counts.values())}

    def __len__(self) -> int:
        return len(self.preferences)

    def __getitem__(self, place: int) -> Group:
        one, first = self.preferences[place], int(self.first[place])
        examples = tuple(self.corpus[first + side] for side in range(len(one.answers)))
        if one.is_desirable is None:
            return Group(examples=examples, place=place)
        other = self.corpus[int(self.first[place - 1])]
        return Group(
            examples=examples,
            place=place,
            is_desirable=one.is_desirable,
            other=self._join(examples[0], other),
        )

    def _join(self, own: Example, other: Example) -> Example:
        """Return a prompt with the answer to another prompt, within the context."""
        start, begin = (int(example.supervised.argmax()) for example in (own, other))
        tokens = np.concatenate([own.tokens[:start], other.tokens[begin:]])[: self.corpus.limit]
        supervised = np.concatenate([own.supervised[:start], other.supervised[begin:]])[: self.corpus.limit]
        return replace(own, tokens=tokens, supervised=supervised) if supervised.any() else own


def tokenize(
    found: Sequence[Preference],
    tokenizer: Tokenizer,
    *,
    config: Config,
    name: str,
    model_limit: int | None,
    progress: OnProgress | None = None,
    ways: Sequence[str] = ("cut", "drop"),
) -> PreferenceCorpus:
    """Tokenize preferences. One with an answer that does not fit the context with its prompt is an error with --truncation
    error, and dropped with --truncation drop. `ways` are the values of --truncation that errors name."""
    rows = [row for one in found for row in one.conversations()]
    corpus = open_corpus(
        Source(name=name, parts=(RowsPart(name=name, loaded=rows),), form="messages"),
        tokenizer,
        asked_format="messages",
        whole=False,
        context_length=config.context_length,
        truncation=config.truncation,
        progress=progress,
        model_limit=model_limit,
        cut_long=True,
        ways=ways,
    )
    owners = [place for place, one in enumerate(found) for _ in one.answers]
    lengths, numbers = corpus.full_lengths(), corpus.rows()
    long = {owners[row] for row in numbers[lengths > corpus.limit].tolist()}
    if long and config.truncation == "error":
        longest = int(lengths.argmax())
        raise UserError(
            f"{len(long)} of {len(found)} rows of {name} have an answer that is longer, with its prompt, than the context of "
            f"{corpus.limit} tokens.",
            why=f"the longest, {found[owners[int(numbers[longest])]].place}, has {int(lengths[longest])} tokens.",
            do=how_to_fit(int(lengths[longest]), model_limit, ways=ways),
        )
    fits = set(numbers[corpus.num_supervised > 0].tolist())
    place_of = {row: place for place, row in enumerate(numbers.tolist())}
    kept, first, row = list[int](), list[int](), 0
    for place, one in enumerate(found):
        answers = range(row, row + len(one.answers))
        if all(answer in fits for answer in answers):
            kept.append(place)
            first.append(place_of[row])
        row += len(one.answers)
    if not kept:
        raise UserError(
            f"No answer of {name} fits into the context of {config.context_length} tokens.",
            do="raise --context_length",
        )
    return PreferenceCorpus(
        corpus=corpus,
        preferences=[found[place] for place in kept],
        first=np.array(first, dtype=np.int64),
        num_too_long=len(found) - len(kept),
        num_cut=len(long.intersection(kept)),
    )
