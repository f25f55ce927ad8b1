"""Train a judge: loss on the verdict only, evaluation by agreement with reference verdicts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer
from crosstune.core.protocols import Evaluation, Sample, Session, Task
from crosstune.core.weights import averaged
from crosstune.data.batches.epoch_order import Mixture
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.data.preflight import warnings_of
from crosstune.recipes.judge.evaluation import defined_metrics, evaluate_items
from crosstune.recipes.judge.examples import ItemCorpus, encode_items, find_label_tokens
from crosstune.recipes.judge.items import Item
from crosstune.recipes.judge.judge import Judge, judge_task
from crosstune.recipes.judge.open_splits import JudgeData, open_judge_data
from crosstune.recipes.judge.rewards import HeadLoss, PairCorpus, encode_pairs
from crosstune.recipes.judge.verdicts import JudgeSettings, choose_format, training_messages
from crosstune.recipes.preference.data_report import BALANCE, MAX_MEASURED, length_bias
from crosstune.recipes.sft import TokenRecipe, engine_parts


class JudgeRecipe(TokenRecipe):
    """The tokenized items of one run, and their evaluation."""

    temperature = 1.0
    """Of the labels' probabilities; fitted in each evaluation."""

    def __init__(self, config: Config, *, data: JudgeData | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self.data = data if data is not None else open_judge_data(config)
        items = [*self.data.train, *self.data.val]
        self.verdict = choose_format(config.verdict, scale=self.data.scale, items=items)
        _check(config, pairs=self.verdict.name == "winner")
        self.tokens = find_label_tokens(self.verdict, self.tokenizer)
        self.train = self._encode(self.data.train, "training")
        if config.balance_scores:
            self._balance()
        self.corpus = self.train.corpus
        self.held_out = self._encode(self.data.val, "validation") if self.data.val else None
        if config.head == "scalar":
            self.weight_name = "pairs" if self.settings.is_reward else "examples"

    def _encode(self, items: Sequence[Item], name: str) -> ItemCorpus | PairCorpus:
        given: dict[str, Any] = {
            "config": self.config,
            "name": f"the {name} items of {self.config.dataset}",
            "model_limit": self.model_limit,
            "progress": self.show_tokenizing(name),
        }
        if self.settings.is_reward:
            return encode_pairs(items, self.tokenizer, **given)
        return encode_items(items, self.tokenizer, verdict=self.verdict, tokens=self.tokens, **given)

    def _balance(self) -> None:
        """Sort the examples by label for a mixture that draws every label equally often."""
        labels = np.array([self.verdict.label_of(item) for item in self.train.items])
        sizes = tuple(np.unique(labels, return_counts=True)[1].tolist())
        self.train = self.train.ordered(np.argsort(labels, kind="stable"))
        if len(sizes) > 1:
            self.mixture = Mixture(sizes=sizes, weights=(1.0,) * len(sizes))

    def task(self, engine: str) -> Task:
        return judge_task(self.config.head, engine)

    def rows(self, step: int) -> list[int]:
        places = super().rows(step)  # of rewards: pairs
        return places if isinstance(self.train, PairCorpus) else [self.corpus[at].index for at in places]

    def batch(self, part: Any, rows: Sequence[Sequence[int]], **options: Any) -> Any:
        return part.batch([place for [place] in rows], pad_id=self.tokenizer.pad_id)

    def identity(self) -> str:
        return hashlib.sha256(f"{self.config.head} {self.train.identity()}".encode()).hexdigest()

    def identity_of(self, part: ItemCorpus | PairCorpus) -> str:
        return part.identity()

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        counts = Counter(self.verdict.label_of(item) for item in self.train.items)
        described = self.describe_rows(form=f"judge: {self.verdict.name}", identity=self.identity()) | {
            "scale": str(self.verdict.scale),
            "labels": {text: counts[place] for place, text in enumerate(self.verdict.labels.texts)},
            "groups": len({item.group for item in self.train.items}),
            "leaking_rows": self.data.num_leaking,
        }
        if self.held_out is not None:
            described["eval"] = self.held_out.corpus.stats
        described["test_items"] = len(self.data.test)
        notes = [*self.data.notes]
        if self.data.num_leaking:
            notes.append(f"{self.data.num_leaking:,} training rows that are also held out were dropped")
        ordered = [
            item.answers if item.winner == "A" else item.answers[::-1]
            for item in self.train.items[:MAX_MEASURED]
            if item.is_pair and item.winner != "tie"
        ]
        lengths = [[len(answer) for answer in answers] for answers in ordered]
        warnings = [
            *warnings_of(described["train"] | {"bad_rows": len(self.data.skipped)}),
            *(length_bias(lengths, advice=BALANCE, unit="characters") if lengths else ()),
        ]
        return described | {k: v for k, v in (("notes", notes), ("warnings", warnings)) if v}

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        judge = self.judge(session)

        def show(done: int, total: int) -> None:
            observer.on_event(Evaluating(done=done, total=total, what="items"))

        items, size = list(self.held_out.items), rows_per_evaluation(self.config)
        rows = [[place] for place in range(len(items))]
        with averaged(session):  # verdicts and loss of the same weights
            result = session.evaluate(self.batches(self.held_out, rows, size=size))
            verdicts = judge.judge(items, progress=show)
            samples = self._samples(judge, items[: self.config.num_samples])
        report = evaluate_items(items, verdicts, scale=self.verdict.scale, intervals=False)
        self.temperature = judge.fit_temperature(items, verdicts)
        return Evaluation(metrics={"loss": result.loss, **defined_metrics(report)}, samples=samples)

    def judge(self, session: Session) -> Judge:
        """Return a judge with the session's model."""
        return Judge(
            session=session,
            tokenizer=self.tokenizer,
            settings=self.settings,
            max_tokens=self.model_limit,
            batch_size=rows_per_evaluation(self.config, at_least=16),
        )

    @property
    def settings(self) -> JudgeSettings:
        return self.verdict.settings(head=self.config.head, temperature=self.temperature)

    def _samples(self, judge: Judge, items: Sequence[Item]) -> list[Sample]:
        if not items or self.config.head == "scalar":
            return []
        texts = judge.generate(items, max_new_tokens=self.config.max_new_tokens)
        samples = []
        for item, text in zip(items, texts, strict=True):
            *asked, verdict = (str(each["content"]) for each in training_messages(item, self.verdict))
            samples.append(Sample(prompt="\n".join(asked), answer=text, reference=verdict))
        return samples

    def complete_result(self, folder: Path) -> None:
        """Write the tokenizer and the judge's settings into the folder of the weights."""
        super().complete_result(folder)
        self.settings.write(folder)


class RewardRecipe(JudgeRecipe):
    """The tokenized pairs of a reward model, learned with the Bradley-Terry loss, and their evaluation."""

    train: PairCorpus

    def task(self, engine: str) -> Task:
        return engine_parts("judge", engine).ScalarHead(
            HeadLoss(of_pairs=True, center=self.config.center_rewards)
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.train.lengths

    def describe(self) -> Mapping[str, Any]:
        described = dict(super().describe())
        for name in ("scale", "labels"):
            described.pop(name)
        learned = (
            f"the data has pairs, so the head learns rewards from {len(self.train):,} of them (Bradley-Terry)"
        )
        if num_long := self.train.pairs.num_too_long:
            learned += f"; {num_long:,} more do not fit the context"
        notes = [learned, *described.get("notes", ())]
        return described | {"format": "judge: rewards", "pairs": len(self.train), "notes": notes}


def open_recipe(config: Config, *, model_folder: Path, observer: Observer | None = None) -> JudgeRecipe:
    """Open the data. A scalar head learns rewards from pairs and scores from scored answers."""
    data = open_judge_data(config)
    kind = RewardRecipe if config.head == "scalar" and data.train[0].is_pair else JudgeRecipe
    return kind(config, model_folder=model_folder, observer=observer, data=data)


def _check(config: Config, *, pairs: bool) -> None:
    """Raise for options that a judge does not support."""
    scalar, cut = config.head == "scalar", config.truncation
    for wrong, asked, why, do in (
        (config.packing, "--packing", "each item needs a separate row", "remove --packing"),
        (config.train_on_prompt, "--train_on_prompt", "a judge learns only the verdict", "remove it"),
        (
            cut in ("cut", "split"),
            f"--truncation {cut}",
            "the verdict is at the end of a row, and would be cut off",
            "use --truncation drop, or a longer --context_length",
        ),
        (
            scalar and config.train_type not in ("full", "lora"),
            f"--head scalar with --train_type {config.train_type}",
            "a scalar head needs full or lora",
            "use --train_type full or lora",
        ),
        (
            scalar and pairs and config.balance_scores,
            "--balance_scores with rewards",
            "every pair has a better answer",
            "remove --balance_scores",
        ),
        (
            not pairs and config.center_rewards,
            "--center_rewards with scores",
            "it centers rewards learned from pairs",
            "remove --center_rewards, or pass rows with prompt, chosen and rejected",
        ),
    ):
        if wrong:
            raise UserError(f"{asked} does not work with the judge recipe.", why=f"{why}.", do=do)
