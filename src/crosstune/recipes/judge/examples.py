"""Tokenize items: conversations with soft labels for training, prompts and answers for judging, the tokens of labels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.data.batches.token_batch import Example, IntArray, TokenBatch, pad_rows
from crosstune.data.read.formats import as_messages, has_empty_answer, tools_of
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.corpus import Corpus
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.metrics import Floats, log_softmax
from crosstune.recipes.judge.verdicts import VerdictFormat, prompt_messages, training_messages
from crosstune.recipes.preference.open_pairs import open_messages
from crosstune.recipes.preference.read_pairs import Preference

_UNLIMITED: Mapping[str, Any] = {
    "context_length": 2**24, "truncation": "error", "model_limit": None, "ways": ("drop",)
}  # fmt: skip
_QUESTION = [{"role": "user", "content": "Rate the answer."}]


def encode_items(
    items: Sequence[Item],
    tokenizer: Tokenizer,
    *,
    config: Config,
    verdict: VerdictFormat,
    tokens: LabelTokens,
    **options: Any,
) -> ItemCorpus:
    """Tokenize conversations with their verdicts. A score between two labels becomes a soft label, if --soft_scores."""
    corpus = open_messages(
        [{"messages": training_messages(item, verdict)} for item in items],
        tokenizer,
        context_length=config.context_length,
        truncation=config.truncation,
        ways=("drop",),
        place=lambda number: f"item {items[number - 1].id}",
        **options,
    )
    kept = [items[place] for place in corpus.rows().tolist()]
    return ItemCorpus(
        corpus=corpus,
        items=kept,
        soft=[
            soft_label(item, corpus[place], verdict=verdict, tokens=tokens) if config.soft_scores else None
            for place, item in enumerate(kept)
        ],
        targets=np.array([_target(item, verdict) for item in kept], np.float32),
        by_rows=config.head == "scalar",
    )


def encode_prompts(
    items: Sequence[Item], *, verdict: VerdictFormat, tokens: LabelTokens, tokenizer: Tokenizer
) -> list[list[int]]:
    """Return the tokens of each item up to its label, rendered exactly as in training."""
    any_verdict = {"role": "assistant", "content": verdict.write(verdict.labels.texts[0])}
    rows = [{"messages": [*prompt_messages(item, verdict), any_verdict]} for item in items]
    corpus = open_messages(rows, tokenizer, name="the items to judge", **_UNLIMITED)
    prompts = []
    for example in corpus:
        place = tokens.place_in(example.tokens, example.supervised)
        assert place > 0, "our own verdict has its label at the expected place"
        prompts.append(example.tokens[:place].tolist())
    return prompts


def as_preference(item: Item) -> Preference:
    """Return the answers of an item in the conversation that a reward model reads."""
    if item.replies:
        return Preference(prompt=list(item.prompt), answers=item.replies, tools=item.tools)
    named = {"Rubric": item.rubric, "Task": item.task, "Reference": item.reference}
    parts = [f"{name}: {text}" for name, text in named.items() if text]
    asked = item.task if len(parts) == 1 else "\n".join(parts)
    return Preference(
        prompt=[{"role": "user", "content": asked}],
        answers=tuple([{"role": "assistant", "content": answer}] for answer in item.answers),
    )


def encode_answers(items: Sequence[Item], *, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens of each answer in its conversation, up to the token whose output is the reward."""
    rows = [row for item in items for row in as_preference(item).conversations()]
    found = dict[int, Example]()
    for place, row in enumerate(rows):
        turns = as_messages(row["messages"])
        if has_empty_answer(turns, shows_reasoning=lambda _: False, rules=tokenizer.data_rules):
            # A corpus leaves it out: there is nothing to learn, but a reward.
            found[place] = encode_conversation(turns, tokenizer, index=0, whole=False, tools=tools_of(row))
    others = [place for place in range(len(rows)) if place not in found]
    if others:
        kept = [rows[place] for place in others]
        corpus = open_messages(kept, tokenizer, name="the answers to judge", **_UNLIMITED)
        found |= dict(zip(others, corpus, strict=True))
    return [
        found[place].tokens[: reward_place(found[place], tokenizer.pad_id) + 1].tolist()
        for place in range(len(rows))
    ]


def reward_place(example: Example, pad_id: int) -> int:
    """Return the last token that is not the padding token, where a sequence classifier of transformers reads its output."""
    return int(np.flatnonzero(example.tokens != pad_id)[-1])


def soft_label(
    item: Item, example: Example, *, verdict: VerdictFormat, tokens: LabelTokens
) -> SoftLabel | None:
    """Return the soft label at the first token where the two labels differ; None if the score equals a label."""
    if item.score is None:
        return None
    nearest, other, share = verdict.labels.neighbors(item.score)
    place = tokens.place_in(example.tokens, example.supervised)
    first, second = tokens.sequences[nearest], tokens.sequences[other]
    same = next(length for length, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    written = tuple(example.tokens[place : place + same + 1].tolist())
    if not share or place < 1 or written != first[: same + 1]:  # the data may have its own verdict
        return None
    return SoftLabel(place=place + same, other=second[same], share=share)


def _target(item: Item, verdict: VerdictFormat) -> float:
    if item.score is not None:
        return verdict.scale.normalized(item.score)
    return {"A": 1.0, "B": 0.0}.get(item.winner or "", 0.5)


@dataclass(frozen=True, kw_only=True)
class JudgeBatch(TokenBatch):
    """Rows with soft targets: `targets` have the probability 1 - `shares`, and `others` the rest."""

    others: IntArray
    shares: NDArray[np.float32]
    scores: NDArray[np.float32]
    """The score of each row as a fraction of the scale."""
    ends: IntArray
    """The last token of each prompt, before the verdict."""
    by_rows: bool

    @property
    def weight(self) -> int:
        return len(self.scores) if self.by_rows else super().weight


class SoftLabel(NamedTuple):
    """The position of a label in its example, and the other token that shares its probability."""

    place: int
    other: int
    share: float


@dataclass(frozen=True, kw_only=True)
class ItemCorpus:
    """The tokenized items that fit into the context."""

    corpus: Corpus
    items: Sequence[Item]
    """In the order of the corpus."""
    soft: Sequence[SoftLabel | None]
    """The soft label of each example; None if it has a single label."""
    targets: NDArray[np.float32]
    """The score of each example as a fraction of the scale."""
    by_rows: bool = False
    """True if the loss is a sum over rows (scalar head)."""

    def __len__(self) -> int:
        return len(self.corpus)

    def batch(self, places: Sequence[int], *, pad_id: int) -> JudgeBatch:
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
            by_rows=self.by_rows,
        )

    def ordered(self, places: NDArray[np.int64]) -> ItemCorpus:
        """Return the examples at these indices, in their order."""
        chosen = places.tolist()
        return dataclasses.replace(
            self,
            corpus=self.corpus.part(places),
            items=[self.items[place] for place in chosen],
            soft=[self.soft[place] for place in chosen],
            targets=self.targets[places],
        )

    def identity(self) -> str:
        sha = hashlib.sha256(self.corpus.hashes().astype("<u8").tobytes())
        sha.update(self.corpus.num_supervised.astype("<i8").tobytes())
        sha.update(self.targets.astype("<f4").tobytes())
        sha.update(repr([tuple(soft) if soft else None for soft in self.soft]).encode())
        return sha.hexdigest()


@dataclass(frozen=True, kw_only=True)
class LabelTokens:
    """The labels as token sequences. Labels of several tokens, such as 1 and 10, may differ at a later token."""

    before: tuple[int, ...]
    """The tokens of a verdict before its label."""
    after_feedback: tuple[int, ...] = ()
    """The same in a verdict that starts with its feedback; empty for a verdict that starts with its label."""
    sequences: tuple[tuple[int, ...], ...]
    """The tokens of each label, up to the first that no other label has."""

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The token prefixes with more than one continuation, shortest first."""
        found: dict[tuple[int, ...], set[int]] = {}
        for sequence in self.sequences:
            for length in range(len(sequence)):
                found.setdefault(sequence[:length], set()).add(sequence[length])
        branching = [path for path, following in found.items() if len(following) > 1]
        return tuple(sorted(branching, key=lambda path: (len(path), path)))

    @property
    def probes(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences to append to a prompt so that all paths are covered; usually one."""
        paths = self.paths
        return tuple(
            path for path in paths if not any(other != path and other[: len(path)] == path for other in paths)
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the labels."""
        return tuple(sorted({token for sequence in self.sequences for token in sequence}))

    def log_probs(self, known: Sequence[Mapping[tuple[int, ...], Floats]]) -> Floats:
        """Return the log probability of each label of each item, normalized over the labels.

        `known` has, for each item and path, the log probabilities of `token_ids` after the path.
        """
        places = {token: place for place, token in enumerate(self.token_ids)}
        found = np.zeros((len(known), len(self.sequences)))
        for label, sequence in enumerate(self.sequences):
            for length, token in enumerate(sequence):
                if (path := sequence[:length]) in self.paths:
                    found[:, label] += [each[path][places[token]] for each in known]
        return log_softmax(found)

    def place_in(self, tokens: IntArray, supervised: NDArray[np.bool_]) -> int:
        """Return the index of the label's first token; -1 if there is none.

        The feedback may contain `before` too, so the first one counts, or the last one if the feedback is in front.
        """
        first = int(supervised.argmax())
        verdict = tokens[first:].tolist() if supervised.any() else []
        ends = [
            start + len(before)
            for before in {self.before, self.after_feedback or self.before}
            for start in range(len(verdict) - len(before) if before else 1)
            if tuple(verdict[start : start + len(before)]) == before
        ]
        return first + (max if self.after_feedback else min)(ends) if ends and verdict else -1


def find_label_tokens(verdict: VerdictFormat, tokenizer: Tokenizer) -> LabelTokens:
    """Tokenize a verdict with each of the labels, and find the tokens in which they differ."""

    def encode(said: str) -> Example:
        turns = [*_QUESTION, {"role": "assistant", "content": said}]
        return encode_conversation(turns, tokenizer, index=0, whole=False)

    examples = [encode(verdict.write(label)) for label in verdict.labels.texts]
    texts = [example.tokens.tolist() for example in examples]
    first = int(examples[0].supervised.argmax()) if examples[0].supervised.any() else 0
    common = common_length(texts)
    if common < first:
        raise UserError(
            f"--verdict {verdict.name} does not work with this tokenizer.",
            why="its tokens before the verdict depend on the label.",
            do="use a different --verdict",
        )
    tails = [tuple(text[common:]) for text in texts]
    before, inside = tuple(texts[0][first:common]), ()
    if verdict.name == "result":  # most tokenizers join the space before it with its first character
        alone, *longer = (
            encode(" ".join(("Feedback: none", said)).strip()).tokens.tolist()
            for said in ("", *map(verdict.write, verdict.labels.texts))
        )
        inside = tuple(longer[0][common_length([alone, longer[0]]) : common_length(longer)])
    sequences = tuple(_distinct(tail, tails) for tail in tails)
    return LabelTokens(before=before, after_feedback=inside, sequences=sequences)


def _distinct(tail: tuple[int, ...], tails: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shortest prefix of a tail that no other tail shares."""
    for length in range(1, len(tail) + 1):
        if sum(other[:length] == tail[:length] for other in tails) == 1:
            return tail[:length]
    raise UserError(
        "Two labels have the same tokens.", do="use a different --verdict, or a different tokenizer"
    )


def common_length(texts: Sequence[list[int]]) -> int:
    """Return the length of the longest common prefix."""
    first, last = min(texts), max(texts)
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
