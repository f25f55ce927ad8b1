"""Open the preferences of a configuration: training and held-out rows without leaks, tokenized, and their micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.data.batches.forked import Fork, fork_rows, separate_rows
from crosstune.data.batches.token_batch import Example, TokenBatch, number_answers, pad_rows
from crosstune.data.named_datasets import RowsPart
from crosstune.data.prompt_rows import PromptRows, num_rows, read_prompt_rows
from crosstune.data.read.files import Row
from crosstune.data.read.sources import Source
from crosstune.data.tokens.corpus import Corpus, how_to_fit, open_corpus
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.preference.read_pairs import TARGETS, Preference, read_preferences

Floats = NDArray[np.float32]
OTHER = "other_"
"""Prefix of the arrays of answers to other prompts."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Answers that are trained together: the chosen and the rejected answer of a pair, or one answer with a label."""

    examples: tuple[Example, ...]
    place: int
    """Its index in the data."""
    is_desirable: bool = True
    """Only for one answer."""
    other: Example | None = None
    """Only for one answer: the prompt with the answer to another prompt, for the KL estimate."""

    @property
    def lengths(self) -> list[int]:
        """The number of supervised tokens of each answer."""
        return [int(example.supervised[1:].sum()) for example in self.examples]


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch:
    """Answers in the order of their pairs, chosen before rejected."""

    tokens: TokenBatch
    lengths: Floats
    """Number of tokens of each answer."""
    mean_chosen: float
    """Mean length of the step's chosen answers, in tokens."""
    num_groups: int
    labels: Floats | None = None
    """1 for a desirable answer, 0 for others; None for pairs."""
    reference: Floats | None = None
    """Log probability of each answer under the reference, if it was computed before training."""
    others: TokenBatch | None = None
    """Answers to other prompts, for the KL estimate of kto."""
    other_reference: Floats | None = None

    @property
    def weight(self) -> int:
        """The number of pairs, or of single answers."""
        return self.num_groups

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def arrays(self, token_arrays: Callable[[TokenBatch], Mapping[str, Array]]) -> dict[str, Array]:
        """Return the arrays for an engine; `token_arrays` makes the arrays of tokens."""
        others = token_arrays(self.others) if self.others is not None else {}
        arrays = {
            **token_arrays(self.tokens),
            **{f"{OTHER}{name}": array for name, array in others.items()},
            "lengths": self.lengths,
            "mean_chosen": np.array(self.mean_chosen, dtype=np.float32),
            "labels": self.labels,
            "reference": self.reference,
            "other_reference": self.other_reference,
        }
        return {name: array for name, array in arrays.items() if array is not None}


def make_batch(
    rows: Sequence[Sequence[Group]],
    *,
    pad_id: int,
    shares_prompts: bool,
    mean_chosen: float,
    reference: Floats | None = None,
) -> PreferenceBatch:
    """Make a micro-batch from rows of groups. `reference` has the log probabilities of all answers of the data, a row for each
    group: of its answers, and of the other answer if the group is a single answer."""
    groups = [group for row in rows for group in row]
    forks = fork_rows([[Fork(group.examples) for group in row] for row in rows], pad_id=pad_id)
    tokens = forks if shares_prompts else separate_rows(forks, pad_id=pad_id)
    batch = PreferenceBatch(
        tokens=tokens,
        lengths=np.array([length for group in groups for length in group.lengths], dtype=np.float32),
        mean_chosen=mean_chosen,
        num_groups=len(groups),
    )
    assert number_answers(tokens).max(initial=-1) + 1 == len(batch.lengths), (
        "every answer has supervised tokens"
    )
    found = reference[[group.place for group in groups]] if reference is not None else None
    if len(groups[0].examples) == 2:
        return replace(batch, reference=found.reshape(-1) if found is not None else None)
    labels = np.array([group.is_desirable for group in groups], dtype=np.float32)
    others = [group.other for group in groups if group.other is not None]
    return replace(
        batch,
        labels=labels,
        others=pad_rows(others, pad_id=pad_id) if others else None,
        reference=found[:, 0] if found is not None else None,
        other_reference=found[:, 1] if found is not None and others else None,
    )


def open_preferences(config: Config, *, paired: bool) -> PromptRows[Preference]:
    """Read the preferences of a configuration; pairs of equal answers are left out."""

    def read(row: Row, place: str) -> list[Preference]:
        found = read_preferences(row, paired=paired, place=place)
        return [one for one in found if len(one.answers) == 1 or one.answers[0] != one.answers[1]]

    data = read_prompt_rows(config, read, targets=TARGETS)
    if not data.train:
        raise UserError(
            f"The dataset {config.dataset} has no preference to learn from.",
            why=f"of {data.num_rows} rows, {data.num_left_out} have two equal answers and {len(data.skipped)} cannot be read.",
            do="add pairs of different answers",
        )
    labels = {one.is_desirable for one in data.train}
    if None not in labels and len(labels) == 1:
        kind = "desirable" if labels == {True} else "undesirable"
        bad = ""
        if data.first_error is not None:
            bad = f" {len(data.skipped):,} rows cannot be read, the first: {data.first_error.message}"
        raise UserError(
            f"Every answer of {config.dataset} is {kind}.",
            why=f"kto learns from the difference between desirable and undesirable answers.{bad}",
            do="add rows with the other label"
            + ("; or train on the answers with --recipe sft" if True in labels else ""),
        )
    return data


@dataclass(frozen=True, kw_only=True)
class PreferenceCorpus:
    """Tokenized preferences whose answers fit into the context."""

    corpus: Corpus
    """A row for each answer."""
    preferences: Sequence[Preference]
    first: NDArray[np.int64]
    """The first row of each preference in the corpus."""
    num_too_long: int = 0
    """Rows that are left out, for an answer that does not fit."""
    num_cut: int = 0
    """Rows with a truncated answer."""

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of the answers, with rows that are cut or dropped instead of examples."""
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


def open_messages(
    rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, *, name: str, **options: Any
) -> Corpus:
    """Tokenize conversations with loss on their last answer. `options`: see `open_corpus`."""
    source = Source(name=name, parts=(RowsPart(name=name, loaded=list(rows)),), form="messages")
    return open_corpus(source, tokenizer, asked_format="messages", whole=False, **options)


def tokenize(
    found: Sequence[Preference],
    tokenizer: Tokenizer,
    *,
    config: Config,
    name: str,
    model_limit: int | None,
    ways: Sequence[str] = ("cut", "drop"),
    **options: Any,
) -> PreferenceCorpus:
    """Tokenize preferences. If an answer does not fit into the context with its prompt, the preference is dropped with
    --truncation drop, and raises an error with --truncation error. `ways`: the values of --truncation that errors suggest.
    `options`: see `open_corpus`."""
    rows = [row for one in found for row in one.conversations()]
    corpus = open_messages(
        rows,
        tokenizer,
        name=name,
        context_length=config.context_length,
        truncation=config.truncation,
        model_limit=model_limit,
        cut_long=True,
        ways=ways,
        **options,
    )
    owners = [place for place, one in enumerate(found) for _ in one.answers]
    lengths, numbers = corpus.full_lengths(), corpus.rows()
    long = {owners[row] for row in numbers[lengths > corpus.limit].tolist()}
    if long and config.truncation == "error":
        longest = int(lengths.argmax())
        raise UserError(
            f"{num_rows(found[place] for place in long)} of {num_rows(found)} rows of {name} have an answer that is longer, with its prompt, than the context of "
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
        num_too_long=num_rows(found[place] for place in set(range(len(found))).difference(kept)),
        num_cut=num_rows(found[place] for place in long.intersection(kept)),
    )
