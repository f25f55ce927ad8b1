"""Distill a teacher into the trained model: its distributions for the data's tokens or the student's own answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, raise_all
from crosstune.core.events import Observer, Warned
from crosstune.core.protocols import Array, Backward, DividesPrompts, Metrics, Session, Task
from crosstune.core.sampling import Sampling
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.data.batches.token_batch import Example, TokenBatch, pad_rows, split_rows
from crosstune.data.tokens.corpus import Corpus
from crosstune.files.run_record import read_log
from crosstune.recipes.distill.losses import Objective
from crosstune.recipes.distill.teacher import Teacher, num_tokens
from crosstune.recipes.preference.reference import complete_reference
from crosstune.recipes.sft import SftRecipe, engine_parts

Floats = NDArray[np.float32]
CLOSER = 0.95
"""The fraction of the first divergence below which the student has come closer."""
CLOSE = 0.02
"""A student within this divergence, in nats per token, is close."""
NO_BETTER = 1.0
"""The teacher's cross entropy relative to the student's, from which the teacher is no better."""


@dataclass(frozen=True, kw_only=True)
class DistillBatch:
    """Rows of tokens, with the teacher's distributions for the supervised tokens if they are stored."""

    tokens: TokenBatch
    ce_weight: float
    """The weight of the cross entropy of the supervised tokens."""
    teacher: Floats | None = None

    @property
    def weight(self) -> int:
        """The number of supervised tokens."""
        return self.tokens.weight

    @property
    def num_tokens(self) -> int:
        return self.tokens.num_tokens

    def own_arrays(self) -> dict[str, Array]:
        """Return all arrays except the tokens."""
        stored = {"teacher": self.teacher} if self.teacher is not None else {}
        return {"ce_weight": np.array(self.ce_weight, dtype=np.float32), **stored}


class DistillRecipe(SftRecipe):
    """The tokenized conversations of one run, and the teacher."""

    def __init__(self, config: Config, *, model_folder: Path, **options: Any) -> None:
        raise_all(check_options(config))
        super().__init__(config, model_folder=model_folder, **options)
        self.objective = Objective.from_config(config, width=num_tokens(self.tokenizer))
        self.teacher = Teacher(config=config, student=model_folder, observer=self.observer)
        self._stored: dict[str, Floats] = {}
        """The teacher's distributions of all supervised tokens by split, if they are stored."""

    def configure(self, config: Config) -> None:
        """Set the final options; raise if the teacher is missing, has different tokens, or equals the student, which leaves
        nothing to learn. Not checked before: a plan opens the data without fetching the teacher."""
        super().configure(config)
        teacher, may_be_stored = self.teacher, config.teacher_top_k and config.resume != "none"
        if teacher.problem is not None and may_be_stored:
            return
        if teacher.problem is not None:
            raise teacher.problem
        with naming("teacher"):
            teacher.check_tokens(self.tokenizer)
        if teacher.is_student and not (config.ce_weight and config.on_policy_share < 1):
            raise UserError(
                f"The teacher {teacher.name} is the model that is trained.",
                why="the student starts with the teacher's distributions, so the loss is 0 and nothing is learned.",
                do="name a larger --teacher, or add --ce_weight 1 to learn from the data near the teacher, with an "
                "--on_policy_share below 1",
            )

    def task(self, engine: str) -> Task:
        return engine_parts("distill", engine).DistillLM(self.objective, self.teacher)

    def prepare_session(
        self, session: Any, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Read or compute the teacher's distributions if they are stored; warn if the teacher has changed since the last start."""
        if earlier is not None and self.teacher.problem is None:
            before = read_log(earlier / "plan.json").get("data", {}).get("teacher", {}).get("identity")
            if before not in (None, self.teacher.identity):
                message = (
                    f"the weights of the teacher {self.teacher.name} have changed since the run was started"
                )
                observer.on_event(Warned(message=message))
        if not self.config.teacher_top_k:
            return
        problem, plan, size = self.teacher.problem, session.plan, rows_per_evaluation(self.config)
        parts = self.parts()
        if self.config.skip_eval:
            parts.pop("held_out", None)

        def compute(batches: Iterable[DistillBatch]) -> Iterable[Floats]:
            if problem is not None:
                raise problem
            return session.task.teacher_rows(session, batches)

        self._stored = complete_reference(
            self,
            folder=folder,
            earlier=earlier,
            identities={name: self._identify(part) for name, part in parts.items()},
            starts={name: self._starts[name] for name in parts},
            columns=self.objective.num_columns,
            made=f"{plan.backend.name} {plan.precision} {size} {self.teacher.identity if problem is None else ''}",
            compute=compute,
            role="teacher",
            writes=writes,
            observer=observer,
        )
        session.task.forget_teacher()

    def _identify(self, part: Corpus) -> str:
        """Return a hash of everything except the teacher that determines the stored values."""
        given = self.objective
        sha = hashlib.sha256(f"{given.top_k} {given.temperature} {given.width}".encode())
        for numbers in (part.hashes(), part.num_supervised, part.lengths()):
            sha.update(np.ascontiguousarray(numbers).astype("<u8").tobytes())
        return sha.hexdigest()

    @cached_property
    def _starts(self) -> dict[str, NDArray[np.int64]]:
        """The first stored row of each example by split, then the number of rows."""
        return {name: np.append(0, np.cumsum(part.num_supervised)) for name, part in self.parts().items()}

    def batch(self, part: Corpus, rows: Sequence[Sequence[int]], **options: Any) -> DistillBatch:
        name = "train" if part is self.train else "held_out"
        stored = self._stored.get(name)
        if stored is not None:
            starts = self._starts[name]
            stored = np.concatenate([stored[starts[at] : starts[at + 1]] for row in rows for at in row])
        tokens = super().batch(part, rows)
        return DistillBatch(tokens=tokens, ce_weight=self.config.ce_weight, teacher=stored)

    def longest_batch(self, size: int) -> DistillBatch:
        batch: DistillBatch = super().longest_batch(size)
        if not self.config.teacher_top_k or batch.teacher is not None:
            return batch
        # Any distributions of this size: the teacher is freed before the first step.
        count, columns = self.objective.num_ids, self.objective.num_columns
        row = np.full(columns, -np.log(columns - count), dtype=np.float32)
        row[:count] = np.arange(count)
        teacher = np.tile(row, (batch.weight, 1))
        return replace(batch, teacher=teacher)

    def describe(self) -> Mapping[str, Any]:
        described, teacher = dict(super().describe()), self.teacher
        if teacher.is_found:
            described["teacher"] = {"name": teacher.name, "identity": teacher.identity}
            if teacher.tokenizer.chat_template not in (None, self.tokenizer.chat_template):
                note = (
                    f"the chat template of the teacher {teacher.name} differs: it reads the conversations in the "
                    "student's template"
                )
                described["warnings"] = [*described.get("warnings", ()), note]
        return described

    def judge_step(self, step: int, result: Backward) -> Mapping[str, str]:
        return {}

    def judge_evaluation(self, evaluations: Mapping[int, Metrics]) -> Mapping[str, str]:
        teacher, ce_weight = self.teacher, self.config.ce_weight
        return {} if teacher.is_student else find_problems(evaluations, teacher.name, ce_weight=ce_weight)


class OnPolicyRecipe(DistillRecipe):
    """Distillation with some steps on the student's own answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._metrics: dict[str, float] = {}
        self._most_prompt = max(map(prompt_length, self.train))
        if self._most_prompt < 2:
            raise UserError(
                f"The rows of {self.config.dataset} have no prompts that the student could answer.",
                why="--on_policy_share trains on its own answers, and every token of a row is supervised.",
                do="use conversations, or remove --on_policy_share",
            )

    def is_on_policy(self, step: int) -> bool:
        """Return True if a step trains on the student's own answers; such steps are spread evenly."""
        share = self.config.on_policy_share
        return int((step + 1) * share + 1e-9) > int(step * share + 1e-9)

    def make_batches(self, session: Session, step: int, *, observer: Observer) -> Sequence[DistillBatch]:
        self._metrics = {"on_policy": float(self.is_on_policy(step))}
        if not self.is_on_policy(step):
            return self.micro_batches(step)
        started = time.perf_counter()
        asked = [self.train[row[0]] for row in self._order().rows(step)]
        answers = self._own_answers(
            session, [one.tokens[: prompt_length(one)].tolist() for one in asked], step=step
        )
        examples = [self._with_answer(one, answer) for one, answer in zip(asked, answers, strict=True)]
        self._metrics["completions/mean_length"] = float(np.mean([len(answer) for answer in answers]))
        self._metrics["time/generate_s"] = time.perf_counter() - started
        rows = split_rows(examples, batch_size=self.config.batch_size, pad_id=self.tokenizer.pad_id)
        return [DistillBatch(tokens=tokens, ce_weight=0.0) for tokens in rows]

    def batch_metrics(self, step: int) -> Metrics:
        return self._metrics

    def carried_state(self) -> Mapping[str, Array]:
        """Return nothing: a step depends on the weights and its number."""
        return {}

    def carry_on(self, state: Mapping[str, Array], *, step: int) -> None:
        """Load nothing."""

    def longest_row(self) -> int:
        own = min(self.train.limit, self._most_prompt + self.config.max_new_tokens)
        return max(super().longest_row(), own)

    def longest_target(self) -> int:
        return max(super().longest_target(), min(self.train.limit, self.config.max_new_tokens))

    def longest_batch(self, size: int) -> DistillBatch:
        longest = max(self.train, key=prompt_length)
        answer = np.full(self.config.max_new_tokens, self.tokenizer.pad_id, dtype=np.int32)
        own = self._with_answer(longest, answer)
        if len(own.tokens) <= super().longest_row():
            return super().longest_batch(size)
        return DistillBatch(tokens=pad_rows([own] * size, pad_id=self.tokenizer.pad_id), ce_weight=0.0)

    def _own_answers(self, session: Session, prompts: Sequence[Sequence[int]], *, step: int) -> list[Array]:
        """Return the answers of the student with its current weights. The processes share the distinct prompts."""
        assert isinstance(session, DividesPrompts), "the task of this recipe generates"
        distinct = list(dict.fromkeys(map(tuple, prompts)))
        own = {distinct[number] for number in session.own_prompts(len(distinct))}
        places = [place for place, prompt in enumerate(prompts) if tuple(prompt) in own]
        config, shortest = self.config, min(map(len, prompts))
        found = session.sample(
            [prompts[place] for place in places],
            max_new_tokens=min(config.max_new_tokens, self.train.limit - shortest),
            stop_ids=sorted(self.tokenizer.stop_ids),
            sampling=Sampling(
                temperature=config.distill_temperature, seed=((config.seed << 32) + step) % 2**63
            ),
        )
        vectors = {
            place: np.array(answer.tokens, np.float32) for place, answer in zip(places, found, strict=True)
        }
        return [vector.astype(np.int32) for vector in session.gather_vectors(vectors)]

    def _with_answer(self, one: Example, answer: Array) -> Example:
        """Return a prompt with another answer, within the context."""
        start, limit = prompt_length(one), self.train.limit
        tokens = np.concatenate([one.tokens[:start], answer])[:limit]
        return replace(one, tokens=tokens, supervised=np.arange(len(tokens)) >= start)


def prompt_length(one: Example) -> int:
    """Return the number of tokens before the last answer."""
    last = int(np.flatnonzero(one.supervised)[-1])
    before = np.flatnonzero(~one.supervised[:last])
    return int(before[-1]) + 1 if len(before) else 0


def check_options(config: Config) -> Iterator[UserError]:
    """Yield a problem for each option that the recipe does not support."""
    if not config.teacher:
        yield UserError(
            "--recipe distill needs a --teacher.",
            do="name a larger model with the same tokenizer: a folder, a bundled name or a hub id",
        )
    elif config.teacher.startswith(("http://", "https://", "server:")):
        yield UserError(
            f"The teacher {config.teacher} is a server.",
            why="servers of the OpenAI protocol give a few log probabilities of tokens that they generate, and not the "
            "distributions for the tokens of the data.",
            do="give the teacher's folder or hub id; with --teacher_top_k it computes once and is freed",
        )
    if not config.on_policy_share:
        return
    if config.teacher_top_k:
        yield UserError(
            "--teacher_top_k cannot be combined with --on_policy_share.",
            why="the student's own answers are not known before the first step, so the teacher must stay.",
            do="remove one of the two",
        )
    for option, why in (
        ("packing", "the lengths of the student's answers are not known before they are written."),
        ("train_on_prompt", "prompts are in the data, and the student writes answers only."),
    ):
        if getattr(config, option):
            yield UserError(f"--on_policy_share cannot be combined with --{option}.", why=why)


def find_problems(evaluations: Mapping[int, Metrics], teacher: str, *, ce_weight: float) -> dict[str, str]:
    """Compare the last evaluation with the one before training; return problem -> sentence, empty if it is over."""
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    found = {"teacher is no better": _no_better(first, teacher)}
    if len(evaluations) > 1:
        found["student stays away"] = _stays_away(first["kl"], last["kl"], ce_weight)
    return found


def _no_better(first: Metrics, name: str) -> str:
    teacher, student = first["teacher_cross_entropy"], first["cross_entropy"]
    if not teacher >= NO_BETTER * student:
        return ""
    return (
        f"on the held-out answers the teacher {name} is no better than the student before training (cross entropy "
        f"{teacher:.3f} and {student:.3f} per token): check that it knows the chat template and the language of the data, "
        "or use a better one"
    )


def _stays_away(before: float, after: float, ce_weight: float) -> str:
    if not after > max(CLOSER * before, CLOSE):
        return ""
    less = ", or lower --ce_weight" if ce_weight else ""
    return (
        f"the student stays away from the teacher: the held-out divergence is {before:.3f} before training and {after:.3f} "
        f"now; raise --lr or --lora_rank, train more steps{less}"
    )
