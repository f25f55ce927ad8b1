"""Supervised fine-tuning on conversations: loss on the assistant's tokens, evaluation by loss and exact match."""

from __future__ import annotations

import hashlib
import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.conditions import ADAPTER_METHODS, TRAIN_TYPE_PARTS
from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec
from crosstune.config.resolve.facts import Preset
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Evaluating, Observer, Observers, Tokenizing
from crosstune.core.protocols import Evaluation, Generates, Sample, Session, Task
from crosstune.core.weights import averaged
from crosstune.data.batches.epoch_order import Mixture
from crosstune.data.batches.packing import PackedOrder
from crosstune.data.batches.row_order import RowOrder, rows_per_evaluation
from crosstune.data.batches.token_batch import add_noise, pack_rows, pad_rows
from crosstune.data.named_datasets import BUNDLED, DUMMY
from crosstune.data.open_data import DataOpener
from crosstune.data.preflight import (
    RowChecker,
    format_warnings,
    num_shared,
    stop_at_template_end,
    summarize_corpus,
    warnings_of,
)
from crosstune.data.read.columns import parse_columns
from crosstune.data.read.files import Row
from crosstune.data.read.formats import tools_of, turns_text
from crosstune.data.read.in_memory import name_in_memory
from crosstune.data.read.pictures import IN_TEXT, WRITTEN, Picture, thumbnail
from crosstune.data.render.built_in_templates import plain_template, read_template
from crosstune.data.render.rendering import encode_prompt
from crosstune.data.render.types import NO_LOSS
from crosstune.data.tokens.corpus import Corpus
from crosstune.data.tokens.encode import Encoder, OnProgress
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.adapter_files import has_trained_template, replace_tokenizer, save_template
from crosstune.models.folder import config_shape, longest_context, read_config_json
from crosstune.models.llama_layout import CHAT_TEMPLATE

_ROWS_SEARCHED = 4096
"""Number of packed rows to search for the fullest."""


@dataclass(frozen=True)
class Question:
    """A held-out prompt and its reference answer."""

    text: str
    tokens: list[int]
    reference: str
    pictures: Sequence[Picture] = ()


class OrderedRecipe:
    """The order of the training examples, which depends on the options and the step number only."""

    config: Config
    train: Any
    """The training examples: tokenized conversations, or groups of them, such as pairs."""
    packed: PackedOrder | None = None
    mixture: Mixture | None = None

    def configure(self, config: Config) -> None:
        self.config = config

    def num_rows(self) -> int:
        return self.packed.num_rows(1) if self.packed is not None else len(self.train)

    def num_steps(self) -> int:
        return self._order().num_steps()

    def rows(self, step: int) -> list[int]:
        return [place for row in self._order().rows(step) for place in row]

    def order(self) -> Mapping[str, Any]:
        return self._order().identity()

    def position(self, step: int) -> Mapping[str, Any]:
        return self._order().position(step)

    def _order(self) -> RowOrder:
        return RowOrder.from_config(
            self.config, num_examples=len(self.train), packed=self.packed, mixture=self.mixture
        )


class TokenRecipe(OrderedRecipe):
    """The batches and sizes of tokenized rows, shared by the recipes that train language models."""

    weight_name = "supervised_tokens"
    observer: Observer
    tokenizer: Tokenizer
    data: Any
    """The rows as read; `skipped` has the rows that cannot be read, as JSON text: file, line and reason."""
    corpus: Corpus
    """The tokenized conversations of training."""
    held_out: Any = None
    """The examples of an evaluation; None or empty if nothing is evaluated."""
    truncation_of_report = ""
    """The value of --truncation for a report about rows that stop training as too long; empty: the data handles it."""

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        observer: Observer | None = None,
        cut_long: bool = False,
    ) -> None:
        """Open the tokenizer. With `cut_long`, for a report, rows that training rejects as too long are cut or left out."""
        self.cut_long, self.stops_at_long = cut_long, cut_long and config.truncation == "error"
        if self.stops_at_long and self.truncation_of_report:
            config = replace(config, truncation=self.truncation_of_report)
        self.config, self.observer = config, observer or Observers()
        self.tokenizer, self.model_limit = open_tokenizer(config, model_folder), longest_context(model_folder)

    def batch(self, part: Any, rows: Sequence[Sequence[int]], **options: Any) -> Any:
        """Return a micro-batch: in each row the examples of `part`, training or held out, at these indices."""
        raise NotImplementedError

    def identity_of(self, part: Any) -> str:
        """Return a hash of the training or held-out examples."""
        raise NotImplementedError

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each training example."""
        return self.corpus.lengths()

    def longest_row(self) -> int:
        lengths = self.lengths
        return int(lengths.max() if self.packed is None else min(lengths.sum(), self.packed.capacity))

    def longest_target(self) -> int:
        return int(self.corpus.num_supervised.max()) if self.packed is None else self.longest_row()

    def longest_batch(self, size: int) -> Any:
        return self.batch(self.train, self.longest_rows(size))

    def longest_rows(self, size: int) -> list[list[int]]:
        """Return the indices in the longest or fullest rows, repeated if there are fewer than `size`."""
        if self.packed is None:
            return [[place] for place in np.resize(np.argsort(-self.lengths, kind="stable"), size).tolist()]
        lengths, rows = self.packed.lengths, self.packed.rows(0, min(self.num_rows(), _ROWS_SEARCHED))
        fullest = sorted(rows, key=lambda row: -int(lengths[row].sum()))
        return [fullest[number % len(fullest)].tolist() for number in range(size)]

    def micro_batches(self, step: int) -> list[Any]:
        return list(self.batches(self.train, self._order().rows(step), size=self.config.batch_size))

    def batches(
        self, part: Any, rows: Sequence[Sequence[int]], *, size: int, **options: Any
    ) -> Iterator[Any]:
        for start in range(0, len(rows), size):
            yield self.batch(part, rows[start : start + size], **options)

    def held_out_batches(self, observer: Observer) -> Iterator[Any]:
        """Yield the batches of an evaluation, and report its progress."""
        rows, size = [[place] for place in range(len(self.held_out))], rows_per_evaluation(self.config)
        return reporting(self.batches(self.held_out, rows, size=size), -(-len(rows) // size), observer)

    def position(self, step: int) -> Mapping[str, Any]:
        following = self.rows(step) if step < self.num_steps() else []
        return {**super().position(step), "next_examples": following}

    def parts(self) -> dict[str, Any]:
        """Return the training examples, and the held-out examples if there are any."""
        return {"train": self.train} | ({"held_out": self.held_out} if self.held_out else {})

    def identity(self) -> str:
        return self.identity_of(self.train)

    def eval_identity(self) -> str | None:
        return self.identity_of(self.held_out) if self.held_out and not self.config.skip_eval else None

    def skipped_rows(self) -> Sequence[str]:
        return self.data.skipped

    def complete_result(self, folder: Path) -> None:
        write_tokenizer(self.config, self.tokenizer, folder)

    def show_tokenizing(self, source: str) -> OnProgress:
        """Return a callback that reports the progress of a tokenization."""

        def show(done: int, total: int, examples: int) -> None:
            event = Tokenizing(source=source, done_bytes=done, total_bytes=total, examples=examples)
            self.observer.on_event(event)

        return show

    def describe_rows(self, *, form: str, identity: str, without_answer: int = 0) -> dict[str, Any]:
        """Return the part of the data report that all token recipes share."""
        facts = self.corpus.store.facts
        kept = (
            "bad_rows", "unlocated_answers", "without_reasoning", "unused_columns", "ignored_by_template", "joined_tokens"
        )  # fmt: skip
        counts = {"rows": facts["rows"], "empty_answers": facts["empty"], "without_answer": without_answer}
        more: dict[str, Any] = {"stops_at_long": True} if self.stops_at_long else {}
        if self.packed is not None:
            more |= {"packed_rows": self.packed.num_rows(1), "packed_fill": self.packed.fill()}
        return {
            "dataset": name_in_memory(self.config.dataset),
            "format": form,
            "identity": identity,
            "context_length": self.corpus.limit,
            "num_steps": self.num_steps(),
            "train": self.corpus.stats | counts | {name: facts[name] for name in kept},
            **summarize_corpus(self.corpus, self.tokenizer),
            **more,
        }


class SftRecipe(TokenRecipe):
    """The tokenized data of one run, and its evaluation."""

    def __init__(self, config: Config, **options: Any) -> None:
        super().__init__(config, **options)
        opener = DataOpener(
            config=config,
            tokenizer=self.tokenizer,
            observer=self.observer,
            model_limit=self.model_limit,
            cut_long=self.cut_long,
        )
        self.data = opener.open()
        self.train = self.corpus = self.data.train
        self.held_out, self.mixture = self.data.held_out, self.data.mixture
        self.has_pictures = any(
            (one.store.picture_ends[one.kept] > 0).any()
            for one in (self.train, self.held_out)
            if one is not None
        )
        if config.image_pixels is not None and self.tokenizer.vision is None:
            why = f"{self.tokenizer.why_no_pictures}."
            raise UserError("--image_pixels has no effect.", why=why, do="remove it")
        self.questions = _questions(self.data.held_out_rows, self.tokenizer)
        if config.packing:
            self.packed = PackedOrder(
                self.train.lengths(), capacity=self.train.limit, seed=config.seed, mixture=self.mixture
            )

    def most_patches(self) -> int:
        vision = self.tokenizer.vision
        if not self.has_pictures or vision is None:
            return 0
        sizes = self.train.picture_sizes()
        patches = {place: sum(vision.num_patches(*size) for size in own) for place, own in sizes.items()}
        if self.packed is None:
            return max(patches.values(), default=0)
        rows = self.packed.rows(0, min(self.num_rows(), _ROWS_SEARCHED))
        return max(sum(patches.get(place, 0) for place in row.tolist()) for row in rows)

    def rows(self, step: int) -> list[int]:
        return [self.corpus[place].index for place in super().rows(step)]

    def batch(self, part: Corpus, rows: Sequence[Sequence[int]], **options: Any) -> Any:
        examples, pad_id = [[part[place] for place in row] for row in rows], self.tokenizer.pad_id
        if self.packed is not None and part is self.train:
            return pack_rows(examples, pad_id=pad_id)
        return pad_rows([one for [one] in examples], pad_id=pad_id)

    def task(self, engine: str) -> Task:
        if self.has_pictures and engine != "torch":
            raise UserError(
                "Rows with pictures do not train on MLX.",
                why="the MLX engine has language models only.",
                do="use a torch backend, such as --backend cpu or cuda",
            )
        name, kind = ("vision_lm", "VisionLM") if self.has_pictures else ("causal_lm", "CausalLM")
        module = importlib.import_module(f"crosstune.{engine}_engine.tasks.{name}")
        return getattr(module, kind)()

    def micro_batches(self, step: int) -> list[Any]:
        batches, alpha = super().micro_batches(step), self.config.neftune_alpha
        return add_noise(batches, alpha=alpha, seed=self.config.seed, step=step) if alpha else batches

    def identity_of(self, part: Corpus) -> str:
        """Return a hash of the token ids and the number of supervised tokens: a copy of the file has the same."""
        sha = hashlib.sha256(part.hashes().astype("<u8").tobytes())
        for numbers in (part.num_supervised, part.lengths()):
            sha.update(numbers.astype("<i8").tobytes())
        return sha.hexdigest()

    def describe(self) -> Mapping[str, Any]:
        """Return the data report for the screen, plan.json and the HTML page."""
        config = self.config
        notes = [name_in_memory(note) for note in self.data.notes]
        described = self.describe_rows(
            form=self.train.form, identity=self.data.identity(), without_answer=self.data.without_answer
        )
        if self.data.rows:
            described["rows"] = dict(self.data.rows)
        if self.data.sources:
            described["sources"] = [
                {**source, "name": name_in_memory(source["name"])} for source in self.data.sources
            ]
        if self.held_out is not None:
            described["eval"] = self.held_out.stats
        if "dataset" not in config.sources:
            notes.insert(
                0,
                f"no --dataset was given: this is the bundled demo data `{config.dataset}`; "
                "pass your own with --dataset FILE, a folder or a hub id",
            )
        shared = num_shared(self.train, self.held_out) if self.held_out is not None else 0
        stats = described["train"]
        if self.stops_at_long:  # training rejects what a report cuts
            stats = {**stats, "cut_examples": 0}
        warnings = [
            *warnings_of(stats, num_shared=shared),
            *format_warnings(config, self.tokenizer, form=self.train.form),
        ]
        if self.held_out is None and not config.skip_eval and config.eval_samples:
            warnings.append(
                "nothing is evaluated: the data is too small to hold out "
                f"{'a tenth' if config.eval_fraction is None else f'{config.eval_fraction:.0%}'}, or its rows are the same; "
                "pass other rows with --eval_dataset"
            )
        adapter = Path(config.base_adapter).expanduser() if config.base_adapter else None
        if adapter is not None and config.chat_template is None and has_trained_template(adapter):
            warnings.append(
                f"the adapter {adapter} was trained with its own chat template, which this run does not use; "
                f"to use it, pass --chat_template {adapter / CHAT_TEMPLATE}"
            )
        return described | {k: v for k, v in (("notes", notes), ("warnings", warnings)) if v}

    def metric(self) -> str:
        if self.config.eval_metric == "auto":
            return "exact_match" if self.config.dataset in BUNDLED else "loss"
        return self.config.eval_metric

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation:
        if self.held_out is None:
            return Evaluation(metrics={})
        with averaged(session):  # answers and loss of the same weights
            result = session.evaluate(self.held_out_batches(observer))
            samples = self._answer(session, self.questions[: self.config.num_samples], observer)
        metrics = {"loss": result.loss, **result.metrics}
        if self.metric() != "exact_match" or not self.questions:
            metrics.pop("exact_match", None)
        return Evaluation(metrics=metrics, samples=samples)

    def complete_result(self, folder: Path) -> None:
        write_tokenizer(self.config, self.tokenizer, folder, has_turns=self.train.form not in ("text", DUMMY))

    def _answer(self, session: Session, questions: Sequence[Question], observer: Observer) -> list[Sample]:
        if not questions:
            return []
        assert isinstance(session, Generates), "the task of this recipe generates"
        done = itertools.count(1)
        more: dict[str, Any] = {"pictures": [one.pictures for one in questions]} if self.has_pictures else {}
        answers = session.sample(
            [question.tokens for question in questions],
            **more,
            max_new_tokens=self.config.max_new_tokens,
            stop_ids=sorted(self.tokenizer.stop_ids),
            on_answer=lambda _: observer.on_event(Evaluating(done=next(done), total=len(questions))),
        )
        return [
            Sample(
                prompt=question.text,
                answer=self.tokenizer.decode(answer.content).strip(),
                reference=question.reference,
                pictures=[thumbnail(picture) for picture in question.pictures],
            )
            for question, answer in zip(questions, answers, strict=True)
        ]


def check_data(config: Config, *, model_folder: Path | None) -> list[str]:
    """Raise if a row cannot be read or, when the model is local, rendered. Return the skipped checks.

    Nothing is tokenized.
    """
    checker = RowChecker(
        asked_format=config.dataset_format,
        columns=parse_columns(config.columns),
        tokenizer=open_tokenizer(config, model_folder) if model_folder is not None else None,
        whole=config.train_on_prompt,
        skips_bad=config.skip_bad_rows,
    )
    left = checker.check(config.dataset, limit=config.dataset_samples)
    if config.eval_dataset and config.eval_samples and not config.skip_eval:
        left += checker.check(config.eval_dataset, limit=config.eval_samples, training=False)
    if config.dataset not in (*BUNDLED, DUMMY) and config.truncation == "error":
        left.append(f"whether every example fits the context and has tokens to learn: {NOT_TOKENIZED}")
    return left


def write_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path, *, has_turns: bool = True) -> None:
    """Write the run's tokenizer and its chat template: --chat_template, or a plain one if there is none."""
    if config.tokenizer is not None:
        replace_tokenizer(Path(config.tokenizer).expanduser(), folder)
    if config.chat_template is not None:
        assert tokenizer.chat_template is not None
        save_template(folder, tokenizer.chat_template, stop_ids=tokenizer.stop_ids)
    elif has_turns and not tokenizer.chat_template:
        (folder / CHAT_TEMPLATE).write_text(
            plain_template(leading_bos=bool(tokenizer.leading_bos)), encoding="utf-8"
        )


def open_tokenizer(config: Config, model_folder: Path) -> Tokenizer:
    """Open the tokenizer of --tokenizer or of the model, with the chat template of --chat_template or its own.

    A special token that ends an answer in --chat_template also ends generation.
    """
    if config.tokenizer is None:
        tokenizer = Tokenizer.from_folder(model_folder)
    else:
        tokenizer = Tokenizer.from_folder(Path(config.tokenizer).expanduser(), model=model_folder)
        shape = config_shape(read_config_json(model_folder))
        if shape is not None:
            tokenizer.check_fits(shape.vocab, source=config.tokenizer)
    tokenizer = replace(tokenizer, data_rules=config.data_rules)
    if config.recipe == "sft":
        tokenizer = tokenizer.with_vision(model_folder, pixels=config.image_pixels)
    if config.chat_template is None:
        return tokenizer
    template = read_template(config.chat_template, adds_bos=tokenizer.adds_bos)
    return stop_at_template_end(
        replace(tokenizer, chat_template=template, template_file=config.chat_template)
    )


def engine_parts(recipe: str, engine: str) -> Any:
    """Return the module with the parts of a recipe for an engine."""
    return importlib.import_module(f"crosstune.recipes.{recipe}.{engine}_parts")


def low_rate(config: Config, *, what: str) -> dict[str, Preset]:
    """Return a learning rate far below that of supervised fine-tuning, which would break the model."""
    is_adapter = TRAIN_TYPE_PARTS[config.train_type][0] in ADAPTER_METHODS
    reason = f"usual for {what} with {'adapters' if is_adapter else 'full fine-tuning'}"
    return (
        {"lr": Preset(value=1e-5 if is_adapter else 1e-6, reason=reason)}
        if "lr" not in config.sources
        else {}
    )


def reporting(
    batches: Iterable[Any], total: int, observer: Observer, *, done: int = 0, stage: str = ""
) -> Iterator[Any]:
    """Yield the batches of an evaluation after the first `done`, and report its progress about twenty times; a stage that takes
    longer, about a hundred times."""
    every = max(1, total // (100 if stage else 20))
    for index, batch in enumerate(batches, start=done):
        if index and index % every == 0:
            observer.on_event(Evaluating(done=index, total=total, what="batches", stage=stage))
        yield batch


def _questions(rows: Sequence[tuple[Row, str, Path | None]], tokenizer: Tokenizer) -> list[Question]:
    questions = []
    for row, form, folder in rows:
        conversation, pictures = Encoder(tokenizer=tokenizer, form=form, whole=False).read(row, folder)
        if isinstance(conversation, str) or conversation[-1]["role"] != "assistant":
            continue
        if NO_LOSS in conversation[-1]:
            continue
        asked, reference = conversation[:-1], conversation[-1]["content"].strip()
        if not asked or not reference:  # an answer that only calls a tool has no text to compare
            continue
        tokens = encode_prompt(asked, tokenizer, tools=tools_of(row), pictures=pictures)
        text = turns_text(asked).replace(IN_TEXT, WRITTEN)
        questions.append(Question(text, tokens, reference, pictures))
    return questions


SPEC = RecipeSpec(open=SftRecipe, check_data=check_data)
