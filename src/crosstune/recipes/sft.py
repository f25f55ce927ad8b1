"""Supervised fine-tuning: conversations in, loss on the assistant's tokens, judged by loss and exact match."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Batch, Evaluation, Example, Observer, Sample, Session
from crosstune.data.batches import num_supervised, split_rows
from crosstune.data.chat import encode_conversation, encode_prompt, encode_spans
from crosstune.data.formats import recognise, to_conversation
from crosstune.data.order import rows_of_step, total_steps
from crosstune.data.sources import BUNDLED, Row, read_rows
from crosstune.data.tokenizer import Tokenizer

HELD_OUT_SHARE = 0.1
Conversation = list[dict[str, str]] | str


@dataclass(frozen=True)
class Question:
    """A held-out prompt and the answer it should get."""

    text: str
    tokens: list[int]
    reference: str


class SftRecipe:
    """The data of one run, tokenized, and how to judge what was learned from it."""

    def __init__(self, config: Config, *, model_folder: Path) -> None:
        self.config = config
        self.tokenizer = Tokenizer.from_folder(model_folder)
        train_rows, eval_rows = _split_rows(config)
        self._dropped: dict[str, int] = {}
        train = self._conversations(train_rows, config.dataset)
        held_out = self._conversations(eval_rows, config.eval_dataset or config.dataset)
        self.train = self._encode(train, "train", config.dataset)
        self.held_out = (
            self._encode(held_out, "eval", config.eval_dataset or config.dataset) if held_out else []
        )
        self.questions = _questions(held_out, self.tokenizer)
        self._leave_out_unsupervised()

    def longest_row(self) -> int:
        return max(len(example.tokens) for example in self.train)

    def configure(self, config: Config) -> None:
        self.config = config

    def num_steps(self) -> int:
        config = self.config
        return total_steps(
            len(self.train),
            rows_per_step=self._rows_per_step(),
            num_epochs=config.num_epochs,
            max_steps=config.max_steps,
        )

    def window(self, step: int) -> list[Batch]:
        config = self.config
        by_epochs = round(len(self.train) * config.num_epochs)
        indices = rows_of_step(
            step,
            num_examples=len(self.train),
            rows_per_step=self._rows_per_step(),
            num_rows_in_all=by_epochs or config.max_steps * self._rows_per_step(),
            seed=config.seed,
        )
        rows = [self.train[index] for index in indices]
        return list(split_rows(rows, batch_size=config.batch_size, pad_id=self.tokenizer.pad_id))

    def describe(self) -> Mapping[str, Any]:
        described: dict[str, Any] = {
            "dataset": self.config.dataset,
            "train": self._counts(self.train, "train"),
        }
        described["train"]["left_out_without_answer"] = self._unsupervised
        if self.held_out:
            described["eval"] = self._counts(self.held_out, "eval")
        return described

    def metric(self) -> str:
        if self.config.eval_metric == "auto":
            return "exact_match" if self.config.dataset in BUNDLED else "loss"
        return self.config.eval_metric

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if not self.held_out:
            return Evaluation(metrics={})
        batches = split_rows(self.held_out, batch_size=self.config.batch_size, pad_id=self.tokenizer.pad_id)
        metrics = {"loss": session.evaluate(batches).loss}
        judged = (
            self.questions if self.metric() == "exact_match" else self.questions[: self.config.num_samples]
        )
        samples = self._answer(session, judged, observer)
        if self.metric() == "exact_match" and samples:
            metrics["exact_match"] = sum(s.answer == s.reference for s in samples) / len(samples)
        return Evaluation(metrics=metrics, samples=samples[: self.config.num_samples])

    def _answer(self, session: Session, questions: Sequence[Question], observer: Observer) -> list[Sample]:
        samples: list[Sample] = []
        size = max(16, self.config.batch_size)
        for start in range(0, len(questions), size):
            part = questions[start : start + size]
            answers = session.generate(
                [question.tokens for question in part],
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=sorted(self.tokenizer.stop_ids),
            )
            for question, answer in zip(part, answers, strict=True):
                text = self.tokenizer.decode(answer).strip()
                samples.append(Sample(prompt=question.text, answer=text, reference=question.reference))
            observer.on_event("evaluating", {"done": len(samples), "total": len(questions)})
        return samples

    def _rows_per_step(self) -> int:
        return self.config.batch_size * self.config.gradient_accumulation_steps

    def _conversations(self, rows: Sequence[Row], source: str) -> list[Conversation]:
        if not rows:
            return []
        form = recognise(rows, asked=self.config.dataset_format, source=source)
        conversations = []
        for number, row in enumerate(rows, start=1):
            try:
                conversations.append(to_conversation(row, form))
            except UserError as error:
                raise _in_row(error, number, source) from error
        return conversations

    def _encode(self, conversations: Sequence[Conversation], split: str, source: str) -> list[Example]:
        examples = []
        for index, conversation in enumerate(conversations):
            try:
                examples.append(self._encode_one(conversation, index))
            except UserError as error:
                raise _in_row(error, index + 1, source) from error
        return self._fit_context(examples, split, source)

    def _encode_one(self, conversation: Conversation, index: int) -> Example:
        if isinstance(conversation, str):
            text = conversation + (self.tokenizer.eos_token or "")
            return encode_spans(text, [(0, len(text))], self.tokenizer, index=index)
        return encode_conversation(
            conversation, self.tokenizer, index=index, whole=self.config.train_on_prompt
        )

    def _fit_context(self, examples: list[Example], split: str, source: str) -> list[Example]:
        limit = self.config.context_length
        long = [example for example in examples if len(example.tokens) > limit]
        self._dropped[split] = len(long)
        if not long:
            return examples
        if self.config.truncation == "error":
            longest = max(long, key=lambda example: len(example.tokens))
            raise UserError(
                f"{len(long)} of {len(examples)} examples of {source} are longer than the context of {limit} tokens.",
                why=f"the longest, row {longest.index + 1}, has {len(longest.tokens)} tokens.",
                do=f"raise --context_length to {len(longest.tokens)}, or pass --truncation cut or drop",
            )
        if self.config.truncation == "drop":
            kept = [example for example in examples if len(example.tokens) <= limit]
            if not kept:
                raise UserError(
                    f"Every example of {source} is longer than {limit} tokens.", do="raise --context_length"
                )
            return kept
        return [_cut(example, limit) for example in examples]

    def _leave_out_unsupervised(self) -> None:
        """A row without a supervised token teaches nothing and would make a step of nothing."""
        kept = [example for example in self.train if num_supervised(example)]
        self._unsupervised = len(self.train) - len(kept)
        self.train = kept
        self.held_out = [example for example in self.held_out if num_supervised(example)]
        if not kept:
            raise UserError(
                f"No token of {self.config.dataset} is supervised: there is nothing to learn.",
                why="no row has an answer of the assistant within the context.",
                do="check the roles of the messages, raise --context_length, or pass --train_on_prompt",
            )

    def _counts(self, examples: Sequence[Example], split: str) -> dict[str, int]:
        return {
            "examples": len(examples),
            "tokens": int(sum(len(example.tokens) for example in examples)),
            "supervised_tokens": sum(num_supervised(example) for example in examples),
            "longest": max(len(example.tokens) for example in examples),
            "over_context": self._dropped.get(split, 0),
        }


def open_recipe(config: Config, *, model_folder: Path) -> SftRecipe:
    return SftRecipe(config, model_folder=model_folder)


def _split_rows(config: Config) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows; a data set without a held-out part gives up a tenth of its own."""
    train = read_rows(config.dataset)
    num_held_out = 0 if config.skip_eval else config.eval_samples
    if not num_held_out:
        held_out: list[Row] = []
    elif config.eval_dataset:
        held_out = read_rows(config.eval_dataset, split="test")
    elif config.dataset in BUNDLED:
        held_out = read_rows(config.dataset, split="test")
    else:
        shuffled = random.Random(config.seed).sample(range(len(train)), len(train))
        chosen = set(shuffled[: int(len(train) * HELD_OUT_SHARE)])
        held_out = [train[index] for index in sorted(chosen)]
        train = [row for index, row in enumerate(train) if index not in chosen]
    if config.dataset_samples != -1:
        train = train[: config.dataset_samples]
    return train, held_out[:num_held_out]


def _questions(conversations: Sequence[Conversation], tokenizer: Tokenizer) -> list[Question]:
    questions = []
    for conversation in conversations:
        if isinstance(conversation, str) or conversation[-1]["role"] != "assistant":
            continue
        asked = conversation[:-1]
        if not asked:
            continue
        text = "\n".join(message["content"] for message in asked)
        questions.append(Question(text, encode_prompt(asked, tokenizer), conversation[-1]["content"].strip()))
    return questions


def _cut(example: Example, limit: int) -> Example:
    return Example(
        tokens=np.ascontiguousarray(example.tokens[:limit]),
        supervised=example.supervised[:limit],
        index=example.index,
    )


def _in_row(error: UserError, number: int, source: str) -> UserError:
    return UserError(f"Row {number} of {source}: {error.asked}", why=error.why, do=error.do)
