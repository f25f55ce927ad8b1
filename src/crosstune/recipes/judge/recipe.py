"""Train a judge: loss on the verdict only, evaluation by agreement with human verdicts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer, Observers, Tokenizing
from crosstune.core.protocols import Evaluation, Sample, Session, Task
from crosstune.data.batches.epoch_order import Mixture
from crosstune.data.batches.row_order import RowOrder, rows_per_evaluation
from crosstune.data.checks.portrait import portrait
from crosstune.data.checks.preflight import warnings_of
from crosstune.models.folder import longest_context
from crosstune.recipes.judge.evaluation import defined_metrics, evaluate_items
from crosstune.recipes.judge.examples import ItemCorpus, JudgeBatch, encode_items, find_label_tokens
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge, judge_task
from crosstune.recipes.judge.open_splits import JudgeData, open_judge_data
from crosstune.recipes.judge.verdicts import JudgeSettings, VerdictFormat, choose_format, training_messages
from crosstune.recipes.sft import open_tokenizer, write_tokenizer


class JudgeRecipe:
    """The items of one run, tokenized, and its evaluation."""

    weight_name = "supervised_tokens"

    def __init__(self, config: Config, *, model_folder: Path, observer: Observer | None = None) -> None:
        _check(config)
        self.config, self.observer = config, observer or Observers()
        self.tokenizer = open_tokenizer(config, model_folder)
        self.data: JudgeData = open_judge_data(config)
        items = [*self.data.train, *self.data.val]
        self.verdict: VerdictFormat = choose_format(config.verdict, scale=self.data.scale, items=items)
        if config.head == "scalar" and self.verdict.name == "winner":
            raise UserError(
                "--head scalar does not learn from pairs yet.",
                why="it learns scores.",
                do="use --head tokens, or data with a score for each answer",
            )
        self.tokens = find_label_tokens(self.verdict, self.tokenizer)
        self._limit = longest_context(model_folder)
        self.train, self.mixture = self._balanced(self._encode(self.data.train, "training"))
        self.held_out = self._encode(self.data.val, "validation") if self.data.val else None
        self.temperature = 1.0
        if config.head == "scalar":
            self.weight_name = "examples"

    def _encode(self, items: Sequence[Item], name: str) -> ItemCorpus:
        def show(done: int, total: int, examples: int) -> None:
            self.observer.on_event(
                Tokenizing(source=name, done_bytes=done, total_bytes=total, examples=examples)
            )

        return encode_items(
            items,
            verdict=self.verdict,
            tokens=self.tokens,
            tokenizer=self.tokenizer,
            config=self.config,
            name=f"the {name} items of {self.config.dataset}",
            model_limit=self._limit,
            progress=show,
        )

    def _balanced(self, corpus: ItemCorpus) -> tuple[ItemCorpus, Mixture | None]:
        """Sort the examples by label for a mixture that draws every label equally often."""
        if not self.config.balance_scores:
            return corpus, None
        labels = np.array([self.verdict.label_of(item) for item in corpus.items])
        order = np.argsort(labels, kind="stable")
        sizes = tuple(int(size) for size in np.unique(labels, return_counts=True)[1])
        mixture = Mixture(sizes=sizes, weights=(1.0,) * len(sizes)) if len(sizes) > 1 else None
        return corpus.ordered(order), mixture

    def task(self, engine: str) -> Task:
        return judge_task(self.config.head, engine)

    def longest_row(self) -> int:
        return int(self.train.corpus.lengths().max())

    def num_rows(self) -> int:
        return len(self.train)

    def longest_target(self) -> int:
        return int(self.train.corpus.num_supervised.max())

    def longest_batch(self, size: int) -> JudgeBatch:
        longest = np.argsort(-self.train.corpus.lengths(), kind="stable")
        places = [int(longest[number % len(longest)]) for number in range(size)]
        return next(self._batches(self.train, places, size=size))

    def configure(self, config: Config) -> None:
        self.config = config

    def num_steps(self) -> int:
        return self._order().num_steps()

    def micro_batches(self, step: int) -> list[JudgeBatch]:
        places = [row[0] for row in self._order().rows(step)]
        return list(self._batches(self.train, places, size=self.config.batch_size))

    def _batches(self, corpus: ItemCorpus, places: Sequence[int], *, size: int) -> Iterator[JudgeBatch]:
        for start in range(0, len(places), size):
            yield corpus.batch(
                places[start : start + size],
                pad_id=self.tokenizer.pad_id,
                by_rows=self.config.head == "scalar",
            )

    def rows(self, step: int) -> list[int]:
        indices = self.train.corpus.rows()
        return [int(indices[row[0]]) for row in self._order().rows(step)]

    def identity(self) -> str:
        return hashlib.sha256(f"{self.config.head} {self.train.identity()}".encode()).hexdigest()

    def eval_identity(self) -> str | None:
        return self.held_out.identity() if self.held_out is not None else None

    def order(self) -> Mapping[str, Any]:
        return self._order().identity()

    def position(self, step: int) -> Mapping[str, Any]:
        following = self.rows(step) if step < self.num_steps() else []
        return self._order().position(step) | {"next_examples": following}

    def _order(self) -> RowOrder:
        return RowOrder.from_config(self.config, num_examples=len(self.train), mixture=self.mixture)

    def describe(self) -> Mapping[str, Any]:
        corpus, facts = self.train.corpus, self.train.corpus.store.facts
        train = corpus.stats | {"rows": facts["rows"], "empty_answers": facts["empty"], "without_answer": 0}
        train |= {
            name: facts[name] for name in ("unlocated_answers", "unused_columns", "ignored_by_template")
        }
        counts = Counter(self.verdict.label_of(item) for item in self.train.items)
        described: dict[str, Any] = {
            "dataset": self.config.dataset,
            "format": f"judge: {self.verdict.name}",
            "identity": self.identity(),
            "context_length": corpus.limit,
            "num_steps": self.num_steps(),
            "train": train,
            "scale": str(self.verdict.scale),
            "labels": {text: counts[place] for place, text in enumerate(self.verdict.labels.texts)},
            "groups": len({item.group for item in self.train.items}),
            "leaking_rows": self.data.num_leaking,
            **portrait(corpus, self.tokenizer),
        }
        if self.held_out is not None:
            described["eval"] = self.held_out.corpus.stats
        described["test_items"] = len(self.data.test)
        notes = [*self.data.notes]
        if self.data.num_leaking:
            notes.append(f"{self.data.num_leaking:,} training rows that are also held out were dropped")
        warnings = warnings_of(train, num_shared=0)
        return described | {k: v for k, v in (("notes", notes), ("warnings", warnings)) if v}

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        places, size = range(len(self.held_out)), rows_per_evaluation(self.config)
        result = session.evaluate(self._batches(self.held_out, places, size=size))
        judge = self.judge(session)

        def show(done: int, total: int) -> None:
            observer.on_event(Evaluating(done=done, total=total, what="items"))

        items = list(self.held_out.items)
        verdicts = judge.judge(items, progress=show)
        report = evaluate_items(items, verdicts, scale=self.verdict.scale, intervals=False)
        self.temperature = judge.fit_temperature(items, verdicts)
        samples = self._samples(judge, items[: self.config.num_samples])
        return Evaluation(metrics={"loss": result.loss, **defined_metrics(report)}, samples=samples)

    def judge(self, session: Session) -> Judge:
        """Return a judge with the session's model."""
        return Judge(
            session=session,
            tokenizer=self.tokenizer,
            settings=self.settings(),
            max_tokens=self._limit,
            batch_size=rows_per_evaluation(self.config, at_least=16),
        )

    def settings(self) -> JudgeSettings:
        return JudgeSettings(
            verdict=self.verdict.name,
            scale=str(self.verdict.scale),
            explains=self.verdict.explains,
            head=self.config.head,
            temperature=self.temperature,
        )

    def _samples(self, judge: Judge, items: Sequence[Item]) -> list[Sample]:
        if not items or self.config.head == "scalar":
            return []
        texts = judge.generate(items, max_new_tokens=self.config.max_new_tokens)
        return [
            Sample(
                prompt=judge.prompt_text(item),
                answer=text,
                reference=str(training_messages(item, self.verdict)[-1]["content"]),
            )
            for item, text in zip(items, texts, strict=True)
        ]

    def complete_result(self, folder: Path) -> None:
        """Write the tokenizer and the judge's settings into the folder of the weights."""
        write_tokenizer(self.config, self.tokenizer, folder)
        self.settings().write(folder)


def _check(config: Config) -> None:
    if config.packing:
        raise UserError(
            "--packing does not work with the judge recipe.",
            why="each item with a soft label needs a separate row.",
            do="remove --packing",
        )
    if config.train_on_prompt:
        raise UserError(
            "--train_on_prompt does not work with the judge recipe.",
            why="a judge learns only the verdict.",
            do="remove it",
        )
    if config.truncation in ("cut", "split"):
        raise UserError(
            f"--truncation {config.truncation} does not work with the judge recipe.",
            why="the verdict is at the end of a row, and would be cut off.",
            do="use --truncation drop, or a longer --context_length",
        )
    if config.head == "scalar" and config.train_type not in ("full", "lora"):
        raise UserError(
            f"--head scalar does not work with --train_type {config.train_type}.", do="use full or lora"
        )
