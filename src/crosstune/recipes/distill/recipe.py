"""Distill a teacher into the trained model: the data's tokens, the teacher's distributions for them, and the evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, raise_all
from crosstune.core.events import Observer, Observers, Warned
from crosstune.core.protocols import Array, Backward, Metrics, Task
from crosstune.data.batches.row_order import rows_per_evaluation
from crosstune.data.batches.token_batch import TokenBatch
from crosstune.data.tokens.corpus import Corpus
from crosstune.files.run_record import read_log
from crosstune.recipes.distill.losses import Objective
from crosstune.recipes.distill.teacher import Teacher, num_tokens
from crosstune.recipes.distill.verdicts import find_problems
from crosstune.recipes.preference.reference import complete_reference
from crosstune.recipes.sft import SftRecipe, engine_parts

Floats = NDArray[np.float32]


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

    def __init__(self, config: Config, *, model_folder: Path, observer: Observer | None = None) -> None:
        raise_all(check_options(config))
        super().__init__(config, model_folder=model_folder, observer=observer)
        self.objective = Objective.from_config(config, width=num_tokens(self.tokenizer))
        self.teacher = Teacher(config=config, student=model_folder, observer=observer or Observers())
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
            if teacher.has_other_template(self.tokenizer):
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
