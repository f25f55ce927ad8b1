"""The seams: what a recipe and an engine's session look like to the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from crosstune.core.events import Observer

Array = NDArray[Any]
Metrics = Mapping[str, float]


class Batch(Protocol):
    """A micro-batch: what a recipe makes and its task reads. Holds numpy arrays."""

    @property
    def weight(self) -> int:
        """What the loss of the batch is a sum over: supervised tokens, examples, ..."""
        ...

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch as arrays on the host, in the form the engine copies to its device."""

    weight: int
    num_tokens: int
    arrays: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What the backward passes of a window gave."""

    loss: float
    """The sum of the losses divided by the weight of the whole window, over all ranks."""
    grad_norm: float
    """Before clipping."""
    weight: int
    num_tokens: int
    metrics: Metrics = field(default_factory=dict)
    """The task's own metrics, averaged over the window."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    loss: float
    weight: int
    metrics: Metrics = field(default_factory=dict)


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
    """An opened engine: model, adapters and optimizer on their devices. With several processes, every rank makes the
    same calls in the same order."""

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Turn a batch into arrays on the host. Touches neither model nor device, so a thread may do it ahead."""
        ...

    def backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        """Compute the clipped gradients of a whole window: those of one large batch, as the weight of all its batches
        is known before the first pass. The gradients stay in the session; the loss scale is taken out of them."""
        ...

    def discard(self) -> None:
        """Drop the gradients of the last `backward` and put the random state back to before it."""
        ...

    def update(self, *, lr: float) -> None:
        """Move the weights by the gradients of the last `backward`, and drop those."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult: ...

    def find_nonfinite(self, window: Sequence[PreparedBatch]) -> str:
        """Run a window again and name what is not finite first: a layer's output, or the gradient of a weight."""
        ...

    def memory(self) -> Memory: ...

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of trained parameters, and of all."""
        ...

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return canonical name -> shape of every array in `SessionState.weights`."""
        ...

    def export_state(self, *, copy: bool = True) -> SessionState:
        """Return the state. With `copy`, later steps do not change it; without, it may be valid only until the next."""
        ...

    def import_state(self, state: SessionState) -> None:
        """Continue from a state: the next step equals the one that would have followed where it is from."""
        ...

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        """Take what was trained alone, as `SessionState.weights` has it."""
        ...

    def save_result(self, folder: Path | None) -> Path | None:
        """Write what was trained as other tools read it, to `folder/adapter` or `folder/model`; return that path. A rank
        that does not write passes None."""
        ...


@runtime_checkable
class Generates(Protocol):
    """What the session of a generating model can do besides."""

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


class Task(Protocol):
    """The engine's side of a recipe: its model and its loss. Each engine says in its own `task.py` what it passes."""

    def build(self, opening: Any) -> Any:
        """Return the model, with its weights."""
        ...

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the host arrays of a batch that the loss reads."""
        ...

    def loss(self, model: Any, arrays: Mapping[str, Any]) -> tuple[Any, Mapping[str, tuple[Any, Any]]]:
        """Return the sum of losses over a batch, never a mean, and metrics: each a sum and the weight it is over."""
        ...


@runtime_checkable
class RecordsBase(Protocol):
    """A task that trains over a base model."""

    def base_record(self) -> Mapping[str, Any]:
        """Return which weights, quantized how, are trained over; goes into crosstune.json beside an adapter."""
        ...


class Recipe(Protocol):
    """One kind of training, engine-free: its data, how it is batched and how it is evaluated."""

    weight_name: str
    """What the weight of a batch counts, as metrics.jsonl calls it: `supervised_tokens`, `examples`, ..."""

    def task(self, engine: str) -> Task:
        """Return the recipe's task for an engine; raise a UserError when it has none."""
        ...

    def longest_row(self) -> int:
        """Return the number of tokens of the longest row that a step can meet."""
        ...

    def configure(self, config: Any) -> None:
        """Take the options as finally resolved; the data stays what it is."""
        ...

    def window(self, step: int) -> Sequence[Batch]:
        """Return the micro-batches of optimizer step `step`, counted from 0. Depends on nothing else."""
        ...

    def num_steps(self) -> int: ...

    def describe(self) -> Mapping[str, Any]:
        """Return what plan.json, the screen and the report say about the data."""
        ...

    def identity(self) -> str:
        """Return a hash of the training examples, the same wherever they were read."""
        ...

    def order(self) -> Mapping[str, Any]:
        """Return everything beside the examples that decides which of them make up which step."""
        ...

    def position(self, step: int) -> Mapping[str, Any]:
        """Return where in the data a run stands after `step` steps, in terms that mean the same on any machine."""
        ...

    def rows(self, step: int) -> list[int]:
        """Return the places in the data set, counted from 0, of the examples of a step."""
        ...

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation: ...

    def complete_result(self, folder: Path) -> None:
        """Put beside the trained weights what others need to use them as they were trained."""
        ...
