"""Train on preferences: the loss of pairs or labelled answers, evaluation by rewards, accuracy and generated answers."""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.conditions import ADAPTER_METHODS, KTO, TRAIN_TYPE_PARTS, parse_losses
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, raise_all
from crosstune.core.events import Evaluating, Observer, Observers, Tokenizing
from crosstune.core.protocols import Evaluation, Generates, Sample, Session, Task
from crosstune.core.weights import averaged
from crosstune.data.batches.forked import Fork
from crosstune.data.batches.packing import PackedOrder
from crosstune.data.batches.row_order import RowOrder, rows_per_evaluation
from crosstune.data.checks.preflight import warnings_of
from crosstune.data.render.rendering import encode_prompt
from crosstune.models.folder import longest_context
from crosstune.recipes.preference.batch import Floats, PreferenceBatch, make_batch
from crosstune.recipes.preference.losses import (
    BETAS,
    WITH_SFT,
    PreferenceLoss,
    Settings,
)
from crosstune.recipes.preference.open_pairs import PreferenceCorpus, open_preferences, prompt_key, tokenize
from crosstune.recipes.preference.reference import (
    REFERENCE,
    model_identity,
    read_reference,
    write_reference,
)
from crosstune.recipes.sft import TokenRecipe, open_tokenizer, write_tokenizer


def make_loss(config: Config) -> PreferenceLoss:
    """Return the loss of the options."""
    weights = parse_losses(config.preference_loss)
    main = next(iter(weights))
    sft = config.sft_weight if config.sft_weight is not None else WITH_SFT.get(main, 0.0)
    if sft and "sft" not in weights:
        weights["sft"] = sft
    return PreferenceLoss(
        weights=weights,
        settings=Settings(
            beta=config.beta if config.beta is not None else BETAS.get(main, 0.1),
            label_smoothing=config.label_smoothing,
            gamma=config.simpo_gamma,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        ),
    )


class PreferenceRecipe(TokenRecipe):
    """The tokenized preferences of one run, and their evaluation."""

    def __init__(self, config: Config, *, model_folder: Path, observer: Observer | None = None) -> None:
        self.config, self.observer = config, observer or Observers()
        raise_all(check_options(config))
        self.loss = make_loss(config)
        self.weight_name = "pairs" if self.loss.is_paired else "answers"
        self.tokenizer = open_tokenizer(config, model_folder)
        self._limit = longest_context(model_folder)
        self.data = open_preferences(config, paired=self.loss.is_paired)
        self.train = self._tokenize(self.data.train, "training")
        self.held_out = self._tokenize(self.data.held_out, "held-out") if self.data.held_out else None
        self.corpus = self.train.corpus
        self._reference: Mapping[str, Floats] = {}
        """The reference's log probabilities by split, if they are computed before the training."""
        if config.packing:
            capacity = max(
                self.corpus.limit, int(self._lengths.max())
            )  # both answers of a pair stay in a row
            self.packed = PackedOrder(self._lengths, capacity=capacity, seed=config.seed)

    def _tokenize(self, found: Sequence[Any], name: str) -> PreferenceCorpus:
        def show(done: int, total: int, examples: int) -> None:
            self.observer.on_event(
                Tokenizing(source=name, done_bytes=done, total_bytes=total, examples=examples)
            )

        return tokenize(
            found,
            self.tokenizer,
            config=self.config,
            name=f"the {name} rows of {self.config.dataset}",
            model_limit=self._limit,
            progress=show,
        )

    def task(self, engine: str) -> Task:
        module = importlib.import_module(f"crosstune.recipes.preference.{engine}_parts")
        task: Task = module.PreferenceLM(self.loss)
        return task

    def prepare_session(
        self, session: Session, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Read or compute the reference, and check that the model equals it before the training."""
        if not self.loss.needs_reference:
            return
        if self._is_precomputed():
            self._open_reference(session, folder=folder, earlier=earlier, writes=writes, observer=observer)
        if earlier is None:
            self._check_start(session)

    def _is_precomputed(self) -> bool:
        adapters = TRAIN_TYPE_PARTS[self.config.train_type][0] in ADAPTER_METHODS
        return self.config.reference == "precomputed" or (self.config.reference == "auto" and not adapters)

    def _open_reference(
        self, session: Any, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Set the reference's log probabilities of all answers: those of the run that is continued, or computed now."""
        parts = {"train": self.train, "held_out": self.held_out}
        model = model_identity(self.config, session.task.base_record())
        identities = {name: f"{_identity(part)} {model}" for name, part in parts.items() if part is not None}
        stored = read_reference((earlier or folder) / REFERENCE, identities)
        if stored is None:
            stored = {
                name: self._compute_reference(session, part, observer)
                for name, part in parts.items()
                if part is not None
            }
        if writes and not (folder / REFERENCE).exists():
            write_reference(folder / REFERENCE, stored, identities)
        self._reference = stored

    def _compute_reference(self, session: Any, part: PreferenceCorpus, observer: Observer) -> Floats:
        """Return a row for each preference: its answers, or a single answer and the answer to another prompt."""
        size = rows_per_evaluation(self.config)
        starts = range(0, len(part), size)

        def batches() -> Iterator[PreferenceBatch]:
            for number, start in enumerate(starts):
                yield self._batch(part, [[place] for place in range(len(part))[start : start + size]])
                observer.on_event(
                    Evaluating(done=number + 1, total=len(starts), what="batches of the reference")
                )

        found = session.task.answer_log_probs(session, batches())
        if self.loss.is_paired:
            return np.concatenate([vector.reshape(-1, 2) for vector in found])
        return np.concatenate([vector.reshape(2, -1).T for vector in found])

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
    def _lengths(self) -> NDArray[np.int64]:
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

    def longest_row(self) -> int:
        if self.packed is not None:
            return int(min(self._lengths.sum(), self.packed.capacity))
        return int(self._lengths.max())

    def num_rows(self) -> int:
        return self.packed.num_rows(1) if self.packed is not None else len(self.train)

    def longest_target(self) -> int:
        if self.packed is not None:
            return self.longest_row()
        return int(self.corpus.num_supervised.max()) * (2 if self.loss.is_paired else 1)

    def longest_batch(self, size: int) -> PreferenceBatch:
        if self.packed is not None:
            return self._batch(self.train, self.fullest_rows(size))
        places = np.resize(np.argsort(-self._lengths, kind="stable"), size).tolist()
        return self._batch(self.train, [[place] for place in places])

    def _order(self) -> RowOrder:
        return RowOrder.from_config(self.config, num_examples=len(self.train), packed=self.packed)

    def rows(self, step: int) -> list[int]:
        return [place for row in self._order().rows(step) for place in row]

    def micro_batches(self, step: int) -> list[PreferenceBatch]:
        rows, size = self._order().rows(step), self.config.batch_size
        mean = _mean_chosen(self.train, rows)
        return [
            self._batch(self.train, rows[start : start + size], mean_chosen=mean)
            for start in range(0, len(rows), size)
        ]

    def _batch(
        self,
        corpus: PreferenceCorpus,
        rows: Sequence[Sequence[int]],
        *,
        mean_chosen: float | None = None,
    ) -> PreferenceBatch:
        """Make a batch from rows of indices. `mean_chosen`: for the whole step, if this is a part of it."""
        return make_batch(
            [[corpus[place] for place in row] for row in rows],
            pad_id=self.tokenizer.pad_id,
            shares_prompts=self.config.share_prompts and self.loss.is_paired,
            mean_chosen=mean_chosen if mean_chosen is not None else _mean_chosen(corpus, rows),
            reference=self._reference.get("train" if corpus is self.train else "held_out"),
        )

    def identity(self) -> str:
        return _identity(self.train)

    def eval_identity(self) -> str | None:
        return _identity(self.held_out) if self.held_out is not None and not self.config.skip_eval else None

    def skipped_rows(self) -> Sequence[str]:
        return self.data.skipped

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        form = "pairs" if self.loss.is_paired else "answers with labels"
        described = self.describe_rows(form=f"preference: {form}", identity=self.identity())
        described[form.split()[0]] = len(self.train)
        if self.held_out is not None:
            described["eval"] = self.held_out.corpus.stats
        warnings = [*warnings_of(described["train"], num_shared=0), *self._warnings()]
        return described | {k: v for k, v in (("notes", list(self.data.notes)), ("warnings", warnings)) if v}

    def _warnings(self) -> list[str]:
        data, found = self.data, list[str]()
        if data.num_same:
            found.append(f"{data.num_same} pairs are left out: their two answers are the same")
        if self.train.num_too_long:
            found.append(
                f"{self.train.num_too_long} of {len(data.train)} are left out: an answer does not fit the context"
            )
        pairs = [(prompt_key(one), str(one.answers)) for one in self.train.preferences]
        if repeated := len(pairs) - len(set(pairs)):
            found.append(f"{repeated} of {len(pairs)} rows repeat an earlier row")
        if self.held_out is not None:
            prompts = {prompt_key(one) for one in self.train.preferences}
            shared = sum(prompt_key(one) in prompts for one in self.held_out.preferences)
            if shared:
                found.append(
                    f"{shared} of {len(self.held_out)} held-out prompts are also in the training data"
                )
        if self.loss.is_paired:
            lengths = np.array([self.train[place].lengths for place in range(min(len(self.train), 5000))])
            longer = float((lengths[:, 0] > lengths[:, 1]).mean())
            if len(lengths) >= 20 and not 0.3 <= longer <= 0.7:
                side = "chosen" if longer > 0.5 else "rejected"
                found.append(
                    f"the {side} answer is the longer one in {max(longer, 1 - longer):.0%} of the pairs (mean "
                    f"{lengths[:, 0].mean():.0f} and {lengths[:, 1].mean():.0f} tokens): the model may learn length; "
                    "compare with --preference_loss simpo or ipo, which divide by it"
                )
        return found

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        size, held_out = rows_per_evaluation(self.config), self.held_out
        starts = range(0, len(held_out), size)

        def batches() -> Any:
            for number, start in enumerate(starts):
                yield self._batch(held_out, [[place] for place in range(len(held_out))[start : start + size]])
                observer.on_event(Evaluating(done=number + 1, total=len(starts), what="batches"))

        with averaged(session):
            result = session.evaluate(batches())
            samples = self._answer(session)
        return Evaluation(metrics={"loss": result.loss, **result.metrics}, samples=samples)

    def _answer(self, session: Session) -> list[Sample]:
        assert self.held_out is not None and isinstance(session, Generates)
        asked = {prompt_key(one): one for one in self.held_out.preferences if one.is_desirable is not False}
        chosen = list(asked.values())[: self.config.num_samples]
        if not chosen:
            return []
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
        ]

    def complete_result(self, folder: Path) -> None:
        write_tokenizer(self.config, self.tokenizer, folder)


def _mean_chosen(corpus: PreferenceCorpus, rows: Sequence[Sequence[int]]) -> float:
    return float(np.mean([corpus[place].lengths[0] for row in rows for place in row]))


def _identity(data: PreferenceCorpus) -> str:
    """Return a hash of the tokens, their masks and the labels."""
    corpus = data.corpus
    sha = hashlib.sha256(corpus.hashes().astype("<u8").tobytes())
    for numbers in (corpus.num_supervised, corpus.lengths(), data.first):
        sha.update(numbers.astype("<i8").tobytes())
    sha.update(repr([one.is_desirable for one in data.preferences]).encode())
    return sha.hexdigest()


def check_options(config: Config) -> list[UserError]:
    """Return a problem for each option that the recipe does not support."""
    problems = []
    loss = make_loss(config)
    if config.packing and KTO in loss.weights:
        problems.append(
            UserError(
                "--packing cannot be combined with --preference_loss kto.",
                why="its KL estimate uses the answers of the other rows of a micro-batch.",
                do="remove --packing",
            )
        )
    if config.train_on_prompt:
        problems.append(
            UserError(
                "--train_on_prompt does not work with --recipe preference.",
                why="answers are compared, not prompts.",
            )
        )
    if KTO in loss.weights and config.batch_size == 1:
        problems.append(
            UserError(
                "--preference_loss kto needs a --batch_size of at least 2.",
                why="its KL estimate uses the answers of the other rows of a micro-batch.",
            )
        )
    return problems
