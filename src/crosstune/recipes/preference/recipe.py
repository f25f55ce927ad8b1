"""Train on preferences: the loss of pairs or labeled answers, evaluation by rewards, accuracy and generated answers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.conditions import is_precomputed
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Observer
from crosstune.core.intervals import wilson
from crosstune.core.protocols import Backward, Evaluation, Generates, Metrics, Sample, Session, Task
from crosstune.core.weights import averaged
from crosstune.data.batches.forked import Fork
from crosstune.data.batches.packing import PackedOrder
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.data.preflight import warnings_of
from crosstune.data.prompt_rows import prompt_key
from crosstune.data.render.rendering import encode_prompt
from crosstune.files.run_record import REFERENCE
from crosstune.models.folder import folder_shape
from crosstune.recipes.preference.data_report import account, describe_answers, pair_warnings
from crosstune.recipes.preference.losses import ACCURACY, ANSWER_LENGTH, check_options, make_loss
from crosstune.recipes.preference.open_pairs import (
    Floats,
    PreferenceBatch,
    PreferenceCorpus,
    make_batch,
    open_preferences,
    tokenize,
)
from crosstune.recipes.preference.reference import complete_reference, model_identity
from crosstune.recipes.preference.verdicts import Verdicts, reach_of
from crosstune.recipes.sft import TokenRecipe, engine_parts


class PreferenceRecipe(TokenRecipe):
    """The tokenized preferences of one run, and their evaluation."""

    truncation_of_report = "cut"

    def __init__(self, config: Config, *, model_folder: Path, **options: Any) -> None:
        raise_all(check_options(config))
        super().__init__(config, model_folder=model_folder, **options)
        self.loss = make_loss(config)
        self.weight_name = "pairs" if self.loss.is_paired else "answers"
        shape = folder_shape(model_folder)
        self._num_layers = shape.num_layers if shape is not None else None
        self.data = open_preferences(config, paired=self.loss.is_paired)
        self.train = self._tokenize(self.data.train, "training")
        self.held_out = self._tokenize(self.data.held_out, "held-out") if self.data.held_out else None
        self.corpus = self.train.corpus
        self._reference: Mapping[str, Floats] = {}
        """The reference's log probabilities by split, if they are computed before training."""
        if config.packing:
            capacity = max(self.corpus.limit, int(self.lengths.max()))  # both answers of a pair stay in a row
            self.packed = PackedOrder(self.lengths, capacity=capacity, seed=config.seed)

    def _tokenize(self, found: Sequence[Any], name: str) -> PreferenceCorpus:
        return tokenize(
            found,
            self.tokenizer,
            config=self.config,
            name=f"{self.config.dataset} ({name} answers)",
            model_limit=self.model_limit,
            progress=self.show_tokenizing(name),
        )

    def task(self, engine: str) -> Task:
        return engine_parts("preference", engine).PreferenceLM(self.loss)

    def prepare_session(
        self, session: Any, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Read or compute the reference, and check that the model equals it before training."""
        self._verdicts.reach = reach_of(session.trained_shapes(), num_layers=self._num_layers)
        if not self.loss.needs_reference:
            return
        if is_precomputed(self.config.reference, self.config.train_type):
            record, parts, size = session.task.base_record(), self.parts(), rows_per_evaluation(self.config)
            model = model_identity(self.config, record)

            def compute(batches: Iterable[PreferenceBatch]) -> Iterable[Floats]:
                found = session.task.answer_log_probs(session, batches)
                return [one.reshape(-1, 2) if self.loss.is_paired else one.reshape(2, -1).T for one in found]

            self._reference = complete_reference(
                self,
                folder=folder,
                earlier=earlier,
                identities={name: f"{self.identity_of(part)} {model}" for name, part in parts.items()},
                starts={name: np.arange(len(part) + 1) for name, part in parts.items()},
                columns=2,
                made=f"{session.plan.backend.name} {record['precision']} {size} {self.config.share_prompts}",
                compute=compute,
                role="reference",
                writes=writes,
                observer=observer,
            )
            session.task.forget_reference()
        if earlier is None:
            self._check_start(session)

    def _check_start(self, session: Any) -> None:
        """Raise unless the model equals the reference in the first batch."""
        first = session.evaluate(self.micro_batches(0)[:1])
        limit = 1e-3 if session.plan.precision == "fp32" else 0.05
        rewards = [first.metrics[f"rewards/{side}"] for side in ("chosen", "rejected")]
        off = max(
            abs(reward) for reward in rewards if not math.isnan(reward)
        )  # kto: a batch may have one kind only
        if not off <= limit:
            raise UserError(
                "Before the first step, the model differs from its reference.",
                why=f"a reward is {off:.3g} instead of 0, so the stored reference belongs to another model or other data.",
                do=f"delete {REFERENCE} in the run's folder, or use --reference online",
            )

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each preference in a batch, without padding."""
        shares = self.config.share_prompts
        groups = (self.train[place] for place in range(len(self.train)))
        return np.array(
            [
                Fork(group.examples).length if shares else sum(len(e.tokens) for e in group.examples)
                for group in groups
            ],
            dtype=np.int64,
        )

    def tokens_per_row(self) -> float:
        return float(self.lengths.mean())

    def longest_target(self) -> int:
        if self.packed is not None:
            return self.longest_row()
        return int(self.corpus.num_supervised.max()) * (2 if self.loss.is_paired else 1)

    def batches(
        self, part: PreferenceCorpus, rows: Sequence[Sequence[int]], *, size: int, **options: Any
    ) -> Iterator[PreferenceBatch]:
        return super().batches(part, rows, size=size, mean_chosen=_mean_chosen(part, rows))

    def batch(
        self,
        part: PreferenceCorpus,
        rows: Sequence[Sequence[int]],
        *,
        mean_chosen: float | None = None,
        **options: Any,
    ) -> PreferenceBatch:
        """Make a batch from rows of indices. `mean_chosen`: for the whole step, if this is a part of it."""
        return make_batch(
            [[part[place] for place in row] for row in rows],
            pad_id=self.tokenizer.pad_id,
            shares_prompts=self.config.share_prompts and self.loss.is_paired,
            mean_chosen=mean_chosen if mean_chosen is not None else _mean_chosen(part, rows),
            reference=self._reference.get("train" if part is self.train else "held_out"),
        )

    def identity_of(self, part: PreferenceCorpus) -> str:
        """Return a hash of the tokens, their masks and the labels."""
        corpus = part.corpus
        sha = hashlib.sha256(corpus.hashes().astype("<u8").tobytes())
        for numbers in (corpus.num_supervised, corpus.lengths(), part.first):
            sha.update(numbers.astype("<i8").tobytes())
        sha.update(repr([one.is_desirable for one in part.preferences]).encode())
        return sha.hexdigest()

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        form = "pairs" if self.loss.is_paired else "answers with labels"
        described = self.describe_rows(form=f"preference: {form}", identity=self.identity())
        described["train"] |= self.train.stats
        rows = account(self.data, self.train, self.held_out)
        described |= {form.split()[0]: len(self.train), "rows": rows, "sides": describe_answers(self.train)}
        if self.held_out is not None:
            described["eval"] = self.held_out.stats
        num_cut = 0 if self.stops_at_long else self.train.num_cut
        own = pair_warnings(rows, self.train, self.held_out, loss=self.loss, num_cut=num_cut)
        others = dict.fromkeys(
            ("cut_examples", "dropped_examples", "duplicates"), 0
        )  # the pairs have their own
        warnings = [*warnings_of(described["train"] | others), *own]
        return described | {k: v for k, v in (("notes", list(self.data.notes)), ("warnings", warnings)) if v}

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        with averaged(session):
            result = session.evaluate(self.held_out_batches(observer))
            samples, lengths = self._answer(session)
        accuracy = result.metrics[ACCURACY]
        return Evaluation(
            metrics={"loss": result.loss, **result.metrics}
            | ({ANSWER_LENGTH: float(np.mean(lengths))} if lengths else {}),
            samples=samples,
            intervals={ACCURACY: wilson(accuracy, len(self.held_out))} if math.isfinite(accuracy) else {},
        )

    @cached_property
    def _verdicts(self) -> Verdicts:
        held_out = self.held_out or self.train
        groups = [held_out[place] for place in range(min(len(held_out), 5000))]
        return Verdicts(
            num_steps=self.num_steps(),
            num_held_out=len(held_out),
            mean_tokens=float(np.mean([group.lengths[0] for group in groups if group.is_desirable])),
            loss=self.loss,
        )

    def judge_step(self, step: int, result: Backward) -> Mapping[str, str]:
        return self._verdicts.observe_step(step, result.metrics, num_pairs=result.weight)

    def judge_evaluation(self, evaluations: Mapping[int, Metrics]) -> Mapping[str, str]:
        return self._verdicts.observe_evaluation(evaluations)

    def _answer(self, session: Session) -> tuple[list[Sample], list[int]]:
        """Return generated answers to held-out prompts, and their lengths in tokens."""
        assert self.held_out is not None and isinstance(session, Generates)
        asked = {prompt_key(one): one for one in self.held_out.preferences if one.is_desirable is not False}
        chosen = list(asked.values())[: self.config.num_samples]
        if not chosen:
            return [], []
        prompts = [encode_prompt(list(one.prompt), self.tokenizer, tools=one.tools) for one in chosen]
        answers = session.generate(
            prompts, max_new_tokens=self.config.max_new_tokens, stop_ids=sorted(self.tokenizer.stop_ids)
        )
        return [
            Sample(
                prompt="\n".join(str(turn["content"]) for turn in one.prompt),
                answer=self.tokenizer.decode(answer).strip(),
                reference="\n".join(str(turn["content"]) for turn in one.answers[0]),
            )
            for one, answer in zip(chosen, answers, strict=True)
        ], [len(answer) for answer in answers]


def _mean_chosen(corpus: PreferenceCorpus, rows: Sequence[Sequence[int]]) -> float:
    return float(np.mean([corpus[place].lengths[0] for row in rows for place in row]))
