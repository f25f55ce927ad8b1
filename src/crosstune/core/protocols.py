"""The seams: what a recipe and an engine's session look like to the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.core.events import Observer

IGNORED = -100
"""The target of a position that carries no loss."""

IntArray = NDArray[np.int32]
Array = NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Example:
    """One tokenized document. `supervised[i]` says whether token i is to be predicted."""

    tokens: IntArray
    supervised: NDArray[np.bool_]
    index: int
    """Its place in the data set, counted from 0."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of equal length. Targets are already shifted: position t predicts `targets[:, t]`."""

    input_ids: IntArray
    targets: IntArray
    segments: IntArray
    """0 where there is padding, else the number of the document within its row, from 1."""
    positions: IntArray

    @property
    def num_tokens(self) -> int:
        return int((self.segments > 0).sum())

    @property
    def num_supervised(self) -> int:
        return int((self.targets != IGNORED).sum())


def weight_of(window: Sequence[Batch]) -> int:
    """What the losses of a window are divided by."""
    weight = sum(batch.num_supervised for batch in window)
    if not weight:
        raise UserError(
            "There is nothing to learn in this step.", why="not one token of its rows carries loss."
        )
    return weight


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float
    """Mean over all supervised tokens of the window."""
    grad_norm: float
    num_tokens: int
    num_supervised: int


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    loss: float
    num_supervised: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    used_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Numbers of one evaluation, and the samples behind them."""

    metrics: Mapping[str, float]
    samples: Sequence[Sample] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str
    answer: str
    reference: str = ""


@dataclass(frozen=True, kw_only=True)
class SessionState:
    """Everything of a session that training changes, on the host, in names that mean the same in every engine."""

    weights: Mapping[str, Array]
    """Canonical name -> what is trained, in fp32: the masters, where the model itself is in a shorter type."""
    moments: Mapping[str, Mapping[str, Array]]
    """Slot -> canonical name -> array. Adam's are `first_moment`, `second_moment` and `step` (its count, a scalar)."""
    random: Mapping[str, Array]
    """Generator -> its state, as the engine wrote it. A generator that another engine does not have is left alone."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small values that go into JSON, such as the factor of the loss scale."""

    def num_bytes(self) -> int:
        parts = (self.weights, *self.moments.values(), self.random)
        return sum(array.nbytes for part in parts for array in part.values())


class Session(Protocol):
    """An opened engine: model, adapters and optimizer on their devices."""

    def step(self, window: Sequence[Batch], *, lr: float) -> StepResult: ...

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        on_token: Callable[[int], None] | None = None,
    ) -> list[list[int]]: ...

    def agree(self, flag: bool) -> bool:
        """Whether any process of the run says so; all of them ask at the same place."""
        ...

    def memory(self) -> Memory: ...

    def num_parameters(self) -> tuple[int, int]:
        """Trained, and all."""
        ...

    def export_state(self, *, copy: bool = True) -> SessionState:
        """The state now. A copy, which later steps do not change; without, it may be valid only until the next one."""
        ...

    def import_state(self, state: SessionState) -> None:
        """Continue from there: the next step equals the one that would have followed in the session it is from."""
        ...

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        """Take what was trained alone, as `SessionState.weights` has it."""
        ...

    def blame(self, window: Sequence[Batch]) -> str:
        """Where the numbers of a window first stop being finite: the layer, or the weight whose gradient does."""
        ...

    def save_result(self, run_dir: Path) -> Path:
        """Write what was trained as other tools read it: `adapter/` or `model/`. Returns that folder."""
        ...


class Recipe(Protocol):
    """One kind of training, engine-free: its data, how it is batched and how it is judged."""

    def longest_row(self) -> int:
        """Tokens of the longest row that a step can meet."""
        ...

    def configure(self, config: Any) -> None:
        """Take the options as finally resolved; the data stays what it is."""
        ...

    def window(self, step: int) -> list[Batch]:
        """The micro-batches of optimizer step `step`, counted from 0. Depends on nothing else."""
        ...

    def num_steps(self) -> int: ...

    def describe(self) -> Mapping[str, Any]: ...

    def identity(self) -> str:
        """A hash of the training examples, wherever they were read."""
        ...

    def order(self) -> Mapping[str, Any]:
        """All that decides which examples make up which step, beside the examples themselves."""
        ...

    def position(self, step: int) -> Mapping[str, Any]:
        """Where in the data a run stands after `step` steps, in words that mean the same on any machine."""
        ...

    def rows(self, step: int) -> list[int]:
        """Places in the data set, counted from 0, of the examples of a step."""
        ...

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation: ...

    def complete_result(self, folder: Path) -> None:
        """Put beside the trained weights what others need to use them as they were trained."""
        ...
