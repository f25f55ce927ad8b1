"""Supervised fine-tuning on conversations: loss on the assistant's tokens, evaluation by loss and exact match."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.load import cache_override
from crosstune.config.schema import Config
from crosstune.core.events import Evaluating, Observer, Observers, Tokenizing
from crosstune.core.protocols import Evaluation, Generates, Sample, Session, Task
from crosstune.data.batches import split_packed, split_rows
from crosstune.data.chat import encode_prompt, plain_template
from crosstune.data.check_rows import check_rows
from crosstune.data.corpus import Corpus, open_corpus
from crosstune.data.dummy import dummy_corpus
from crosstune.data.formats import to_conversation, tools_of
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.packing import PackedOrder
from crosstune.data.preflight import format_warnings, leave_out_unsupervised, num_shared, warnings_of
from crosstune.data.row_order import RowOrder
from crosstune.data.sources import Row, Source, open_source
from crosstune.data.token_batch import TokenBatch
from crosstune.data.tokenizer import Tokenizer
from crosstune.models.adapter_files import replace_tokenizer
from crosstune.models.folder import config_shape, read_config_json
from crosstune.models.llama_layout import CHAT_TEMPLATE

HELD_OUT_SHARE = 0.1
# Separates the random stream of held-out rows from those of the epochs, which use the same seed.
_HELD_OUT_KEY = 2**32


@dataclass(frozen=True)
class Question:
    """A held-out prompt and its reference answer."""

    text: str
    tokens: list[int]
    reference: str


class SftRecipe:
    """The tokenized data of one run, and its evaluation."""

    weight_name = "supervised_tokens"

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        cache: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = open_tokenizer(config, model_folder)
        self._cache = cache if cache is not None else cache_override()
        self._observer = observer or Observers()
        self.source = open_source(config.dataset)
        self._without_answer = 0
        self.train, held_out = self._open()
        self.held_out: Corpus | None = None
        self.questions: list[Question] = []
        if held_out is not None:
            source, self.held_out = held_out
            picked = source.pick(self.held_out.rows().tolist())
            self.questions = _questions(list(picked.values()), self.held_out.form, self.tokenizer)
        self._packed = self._pack()

    def longest_row(self) -> int:
        lengths = self.train.lengths()
        if self._packed is not None:
            return int(min(lengths.sum(), self.train.limit))
        return int(lengths.max())

    def configure(self, config: Config) -> None:
        self.config = config

    def task(self, engine: str) -> Task:
        module = importlib.import_module(f"crosstune.{engine}_engine.tasks.causal_lm")
        task: Task = module.CausalLM()
        return task

    def num_steps(self) -> int:
        return self._order().num_steps()

    def window(self, step: int) -> list[TokenBatch]:
        batch_size, pad_id = self.config.batch_size, self.tokenizer.pad_id
        rows = [[self.train[place] for place in row] for row in self._order().rows(step)]
        if self._packed is not None:
            return list(split_packed(rows, batch_size=batch_size, pad_id=pad_id))
        return list(split_rows([row[0] for row in rows], batch_size=batch_size, pad_id=pad_id))

    def rows(self, step: int) -> list[int]:
        return [self.train[place].index for row in self._order().rows(step) for place in row]

    def identity(self) -> str:
        """Return a hash of the token ids and the number of supervised ones, which a copy of the file or a rewritten
        tokenizer does not change."""
        return _identity(self.train)

    def eval_identity(self) -> str | None:
        if self.held_out is None or self.config.skip_eval:
            return None
        return _identity(self.held_out)

    def order(self) -> Mapping[str, Any]:
        return self._order().identity()

    def position(self, step: int) -> Mapping[str, Any]:
        following = self.rows(step) if step < self.num_steps() else []
        return self._order().position(step) | {"next_examples": following}

    def _order(self) -> RowOrder:
        return RowOrder.from_config(self.config, num_examples=len(self.train), packed=self._packed)

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        facts = self.train.store.facts
        train = self.train.stats | {
            "rows": facts["rows"],
            "empty_answers": facts["empty"],
            "without_answer": self._without_answer,
            "unlocated_answers": facts["unlocated_answers"],
            "unused_columns": facts["unused_columns"],
            "ignored_by_template": facts["ignored_by_template"],
        }
        described: dict[str, Any] = {
            "dataset": self.config.dataset,
            "format": self.train.form,
            "identity": self.train.identity,
            "context_length": self.train.limit,
            "num_steps": self.num_steps(),
            "train": train,
        }
        if self._packed is not None:
            rows = self._packed.num_rows(1)
            described |= {"packed_rows": rows, "packed_fill": self._packed.fill()}
        if self.held_out is not None:
            described["eval"] = self.held_out.stats
        shared = num_shared(self.train, self.held_out) if self.held_out is not None else 0
        warnings = [
            *warnings_of(train, num_shared=shared),
            *format_warnings(self.config, self.tokenizer, form=self.train.form),
            *self._missing_evaluation(),
        ]
        return described | ({"warnings": warnings} if warnings else {})

    def _missing_evaluation(self) -> list[str]:
        config = self.config
        if self.held_out is not None or config.skip_eval or not config.eval_samples:
            return []
        return [
            "nothing is evaluated: the data is too small to hold out a tenth; give other rows with --eval_dataset"
        ]

    def metric(self) -> str:
        if self.config.eval_metric == "auto":
            return "exact_match" if self.config.dataset in BUNDLED else "loss"
        return self.config.eval_metric

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        batches = split_rows(
            list(self.held_out), batch_size=self.config.batch_size, pad_id=self.tokenizer.pad_id
        )
        result = session.evaluate(batches)
        metrics = {"loss": result.loss, **result.metrics}
        questions = (
            self.questions if self.metric() == "exact_match" else self.questions[: self.config.num_samples]
        )
        samples = self._answer(session, questions, observer)
        if self.metric() == "exact_match" and samples:
            metrics["exact_match"] = sum(s.answer == s.reference for s in samples) / len(samples)
        return Evaluation(metrics=metrics, samples=samples[: self.config.num_samples])

    def complete_result(self, folder: Path) -> None:
        """Write the tokenizer that the model was trained with, and a plain chat template if it has none."""
        if self.config.tokenizer is not None:
            replace_tokenizer(Path(self.config.tokenizer).expanduser(), folder)
        if self.train.form not in ("text", DUMMY) and not self.tokenizer.chat_template:
            (folder / CHAT_TEMPLATE).write_text(plain_template(self.tokenizer), encoding="utf-8")

    def _answer(self, session: Session, questions: Sequence[Question], observer: Observer) -> list[Sample]:
        samples: list[Sample] = []
        size = max(16, self.config.batch_size)
        for start in range(0, len(questions), size):
            batch = questions[start : start + size]
            assert isinstance(session, Generates), "the task of this recipe generates"
            answers = session.generate(
                [question.tokens for question in batch],
                max_new_tokens=self.config.max_new_tokens,
                stop_ids=sorted(self.tokenizer.stop_ids),
            )
            for question, answer in zip(batch, answers, strict=True):
                text = self.tokenizer.decode(answer).strip()
                samples.append(Sample(prompt=question.text, answer=text, reference=question.reference))
            observer.on_event(Evaluating(done=len(samples), total=len(questions)))
        return samples

    def _pack(self) -> PackedOrder | None:
        if not self.config.packing:
            return None
        return PackedOrder(self.train.lengths(), capacity=self.train.limit, seed=self.config.seed)

    def _open(self) -> tuple[Corpus, tuple[Source, Corpus] | None]:
        """Return the training examples, and the held-out ones with their source. A data set without a held-out split
        gives up a tenth of its rows, at most --eval_samples."""
        config, source = self.config, self.source
        if source.form == DUMMY:
            corpus = dummy_corpus(
                self.tokenizer, config.dataset_samples, context_length=config.context_length
            )
            return corpus, None
        most = 0 if config.skip_eval else config.eval_samples
        if not most or config.eval_dataset or source.held_out:
            corpus, self._without_answer = self._corpus(source, limit=self._num_samples())
            if not most:
                return corpus, None
            other = open_source(config.eval_dataset) if config.eval_dataset else source
            other = other.own_held_out() if other.held_out else other
            return corpus, (other, self._corpus(other, limit=most)[0])
        samples = self._num_samples()
        corpus, self._without_answer = self._corpus(source, limit=samples + most if samples != -1 else -1)
        num_held_out = min(most, int(len(corpus) * HELD_OUT_SHARE))
        if not num_held_out:
            return corpus.part(slice(0, samples if samples != -1 else None)), None
        draw = np.random.Generator(np.random.Philox(key=(config.seed, _HELD_OUT_KEY)))
        chosen = np.sort(draw.choice(len(corpus), size=num_held_out, replace=False))
        remaining = np.setdiff1d(np.arange(len(corpus)), chosen, assume_unique=True)
        train = corpus.part(remaining[: samples if samples != -1 else None])
        return train, (source, corpus.part(chosen))

    def _num_samples(self) -> int:
        asked = self.config.dataset_samples
        return self.source.samples if asked == -1 else asked

    def _corpus(self, source: Source, *, limit: int) -> tuple[Corpus, int]:
        """Return the examples of a source with supervised tokens, and the number of those without."""
        config = self.config

        def show(done_bytes: int, total_bytes: int, examples: int) -> None:
            self._observer.on_event(
                Tokenizing(
                    source=source.name, done_bytes=done_bytes, total_bytes=total_bytes, examples=examples
                )
            )

        corpus = open_corpus(
            source,
            self.tokenizer,
            asked_format=config.dataset_format,
            whole=config.train_on_prompt,
            context_length=config.context_length,
            truncation=config.truncation,
            limit=limit,
            cache=self._cache,
            progress=show,
        )
        return leave_out_unsupervised(corpus, source=source.name)


def open_tokenizer(config: Config, model_folder: Path) -> Tokenizer:
    """Return the tokenizer of --tokenizer, or the model's own."""
    if config.tokenizer is None:
        return Tokenizer.from_folder(model_folder)
    tokenizer = Tokenizer.from_folder(Path(config.tokenizer).expanduser(), model=model_folder)
    shape = config_shape(read_config_json(model_folder))
    if shape is not None:
        tokenizer.check_fits(shape.vocab, source=config.tokenizer)
    return tokenizer


def check_data(config: Config) -> list[str]:
    """Raise if a row of the data cannot be read, without tokenizing; return descriptions of what was not checked."""
    samples = config.dataset_samples
    left = check_rows(config.dataset, asked_format=config.dataset_format, limit=samples)
    if config.eval_dataset and config.eval_samples and not config.skip_eval:
        left += check_rows(config.eval_dataset, asked_format=config.dataset_format, limit=config.eval_samples)
    if config.dataset not in (*BUNDLED, DUMMY) and config.truncation == "error":
        left.append("whether every example fits the context and has tokens to learn: nothing is tokenized")
    return left


def open_recipe(
    config: Config, *, model_folder: Path, cache: Path | None = None, observer: Observer | None = None
) -> SftRecipe:
    return SftRecipe(config, model_folder=model_folder, cache=cache, observer=observer)


def _identity(corpus: Corpus) -> str:
    sha = hashlib.sha256(corpus.hashes().astype("<u8").tobytes())
    sha.update(corpus.num_supervised.astype("<i8").tobytes())
    sha.update(corpus.lengths().astype("<i8").tobytes())
    return sha.hexdigest()


def _questions(rows: Sequence[Row], form: str, tokenizer: Tokenizer) -> list[Question]:
    questions = []
    for row in rows:
        conversation = to_conversation(row, form)
        if isinstance(conversation, str) or conversation[-1]["role"] != "assistant":
            continue
        asked, reference = conversation[:-1], conversation[-1]["content"].strip()
        if not asked or not reference:  # an answer that only calls a tool has no text to compare
            continue
        text = "\n".join(message["content"] for message in asked)
        tokens = encode_prompt(asked, tokenizer, tools=tools_of(row))
        questions.append(Question(text, tokens, reference))
    return questions
