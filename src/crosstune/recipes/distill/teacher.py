"""The teacher of a run: its folder, its tokens, the plan by which an engine opens it, and whether it is the student's own base."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from crosstune.config.conditions import teaches_by_base
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, shown
from crosstune.core.events import ModelProgress, Observer
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.identity import identity
from crosstune.models.locate import locate
from crosstune.models.quantized_folder import read_quantization
from crosstune.planner.gather import plan_like, plan_over_quantized

_SHOWN_TOKENS = 5


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """The teacher of a run. Its folder is located on first use: a run with stored distributions does not need it."""

    config: Config
    student: Path
    """The folder of the model that is trained."""
    observer: Observer

    @property
    def name(self) -> str:
        return str(self.config.teacher)

    @cached_property
    def folder(self) -> Path:
        """The model folder, fetched or converted if needed."""

        def show(stage: str, done: int, total: int | None) -> None:
            self.observer.on_event(ModelProgress(stage=stage, done=done, total=total, model=self.name))

        with naming("teacher"):
            return locate(self.name, progress=show).path

    @property
    def is_found(self) -> bool:
        """True if the folder has been looked up and exists."""
        return "folder" in vars(self)

    @cached_property
    def problem(self) -> UserError | None:
        """The reason why there is no folder."""
        try:
            self.folder  # noqa: B018
        except UserError as error:
            return error
        return None

    @cached_property
    def identity(self) -> str:
        """A hash of the weights."""
        return str(identity(self.folder)["sha256"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def is_student(self) -> bool:
        """True if it has the weights that the student starts from, without an adapter."""
        if self.problem is not None:
            return False
        same = self.folder == self.student or self.identity == identity(self.student)["sha256"]
        return same and not self.config.base_adapter and self.config.teacher_quantization == "none"

    def is_base(self, plan: Plan) -> bool:
        """Return True if the student with its initial adapters is the teacher: then no second model is loaded."""
        return teaches_by_base(plan.config.options(), is_student=True) and self.is_student

    def check_tokens(self, tokenizer: Tokenizer) -> None:
        """Raise unless the teacher has the tokens of the student's `tokenizer`."""
        theirs = self.tokenizer
        own, others = (each.rust.get_vocab(with_added_tokens=True) for each in (tokenizer, theirs))
        kinds = {
            "only the student has": sorted(own.keys() - others.keys(), key=own.__getitem__),
            "only the teacher has": sorted(others.keys() - own.keys(), key=others.__getitem__),
            "different ids have": [
                token for token, number in own.items() if others.get(token, number) != number
            ],
        }
        found = [
            f"{what} {len(tokens):,} tokens, such as {', '.join(map(shown, tokens[:_SHOWN_TOKENS]))}"
            for what, tokens in kinds.items()
            if tokens
        ]
        if found:
            raise UserError(
                f"The teacher {self.name} does not have the tokens of the student.",
                why=f"their probabilities are compared token by token, and {'; '.join(found)}.",
                do="remove --add_tokens"
                if self.config.add_tokens
                else "use a teacher of the same family, whose tokenizer is the same, or train on answers that it writes: "
                "crosstune generate, then --recipe sft",
            )
        width = num_tokens(tokenizer)
        if theirs.num_rows is not None and theirs.num_rows < width:
            raise UserError(
                f"The teacher {self.name} has no outputs for some tokens of the student.",
                why=f"it has {theirs.num_rows:,} outputs, and the tokenizer {width:,} tokens.",
            )

    def opening(self) -> contextlib.AbstractContextManager[None]:
        """Name the option in errors of the `with` block."""
        return naming("teacher" if self.config.teacher_quantization == "none" else "teacher_quantization")

    def plan(self, plan: Plan) -> Plan:
        """Return the plan to open the teacher on the device of the student's plan."""
        stored = read_quantization(self.folder)
        if stored is not None and self.config.teacher_quantization != "none":
            raise UserError(
                f"--teacher_quantization {self.config.teacher_quantization} cannot be applied to {self.name}.",
                why=f"its weights are quantized already: {stored.spec.describe()}.",
                do="remove --teacher_quantization",
            )
        if stored is not None:
            return plan_over_quantized(plan, stored.spec, folder=self.folder)
        bits = {"8bit": 8, "4bit": 4}.get(self.config.teacher_quantization)
        method = (
            {"train_type": "qlora", "n_bits": bits, "quantization_backend": "auto"}
            if bits
            else {"train_type": "lora"}
        )
        kept = {
            name: getattr(plan.config, name) for name in ("packing", "use_flash_attention", "context_length")
        }
        precision = plan.precision.removesuffix("_autocast").removesuffix("_buffers")
        return plan_like(plan, {**method, **kept, "model_name": str(self.folder), "precision": precision})


def num_tokens(tokenizer: Tokenizer) -> int:
    """Return the highest token plus one. Outputs of a model beyond it belong to no token and are not compared."""
    return max(tokenizer.rust.get_vocab(with_added_tokens=True).values()) + 1
