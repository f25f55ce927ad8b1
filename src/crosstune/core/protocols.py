"""Define the protocols between the training loop, recipes and engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from crosstune.core.answers import Answer, Earlier
from crosstune.core.events import Observer
from crosstune.core.sampling import GREEDY, Sampling

Array = NDArray[Any]
Metrics = Mapping[str, float]
CARRIED = "recipe/"
"""Prefix of a recipe's arrays in `SessionState.random`."""


class Batch(Protocol):
    """A micro-batch of numpy arrays, made by a recipe and read by its task."""

    @property
    def weight(self) -> int:
        """The number of terms in the loss sum: supervised tokens, examples, ..."""

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch as host arrays, ready for the engine to copy to its device."""

    weight: int
    num_tokens: int
    arrays: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Backward:
    """The result of the backward passes of a window: the micro-batches of a step on this rank."""

    loss: float
    """The sum of the losses divided by the weight of the whole window, across all ranks."""
    grad_norm: float
    """Before clipping."""
    weight: int
    num_tokens: int
    metrics: Metrics = field(default_factory=dict)
    """The task's metrics, averaged over the window."""

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
    """The metrics of one evaluation, and generated samples."""

    metrics: Mapping[str, float]
    samples: Sequence[Sample] = ()
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % intervals of some metrics."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str
    answer: str
    reference: str = ""
    frames: Sequence[str] = ()
    """The states of the answer while it was generated."""
    score: float | None = None
    """The reward of the answer."""
    pictures: Sequence[str] = ()
    """Thumbnails of the prompt's pictures, as data URIs."""


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """One process's part of a large state: some rows of each array, in part order."""

    number: int
    count: int
    writes: bool
    """True if this process writes the part; its replicas do not."""
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of the full weights."""


@dataclass(frozen=True, kw_only=True)
class SessionState:
    """Everything that training changes in a session, on the host, under engine-independent names."""

    weights: Mapping[str, Array]
    """Canonical name -> trained weight in fp32: the master copy if the model has a narrower dtype."""
    moments: Mapping[str, Mapping[str, Array]]
    """Slot -> canonical name -> array. Adam's slots are `first_moment`, `second_moment` and `step` (a scalar)."""
    random: Mapping[str, Array]
    """Random generator -> its state in the engine's format. An engine ignores generators that it does not have. Names that
    begin with `CARRIED` are arrays of a recipe that generates its batches."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small values for JSON, such as the loss scale."""
    part: StatePart | None = None
    """Set if `weights` and `moments` contain only this process's rows of each array."""

    def num_bytes(self) -> int:
        parts = (self.weights, *self.moments.values(), self.random)
        return sum(array.nbytes for part in parts for array in part.values())


class Session(Protocol):
    """Model, adapters and optimizer, loaded on the device. With multiple processes, every rank makes the same calls in
    the same order."""

    def prepare(self, batch: Batch) -> PreparedBatch:
        """Turn a batch into host arrays. Uses neither model nor device, so a thread may prefetch."""

    def backward(self, window: Sequence[PreparedBatch], *, loss_scale: float = 1.0) -> Backward:
        """Compute and keep the clipped gradients of a whole window, without the loss scale: the gradients of one large batch,
        since each loss is divided by the weight of the window."""

    def discard(self) -> None:
        """Drop the gradients of the last `backward` and restore the random state from before it."""

    def update(self, *, lr: float) -> None:
        """Take an optimizer step with the gradients of the last `backward`, and drop them."""

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult: ...

    def find_nonfinite(self, window: Sequence[PreparedBatch]) -> str:
        """Run a window again and return the first non-finite value: a layer's output, or the gradient of a weight."""

    def memory(self) -> Memory: ...

    def num_parameters(self) -> tuple[int, int]:
        """Return the number of trained parameters, and of all parameters."""

    def trained_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return canonical name -> shape of every array in `SessionState.weights`."""

    def export_state(self, *, copy: bool = True, divided: bool = False) -> SessionState:
        """Return the state. Without `copy`, it may be valid only until the next step. If `divided`, a large state that is
        sharded across processes may stay so: each returns its part."""

    def import_state(self, state: SessionState) -> None:
        """Load a state: the next step equals the step that would have followed in the session that exported it."""

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        """Load trained weights alone, as in `SessionState.weights`."""

    def save_result(self, folder: Path | None) -> Path | None:
        """Write the trained weights in a form that other tools read, to `folder/adapter` or `folder/model`; return that
        path. A rank that does not write passes None."""


def is_divided(session: Session) -> bool:
    """Return True if exporting the state is a collective call, because each session has only a part of the state."""
    return bool(getattr(session, "is_divided", False))


@runtime_checkable
class Generates(Protocol):
    """A session whose model can generate text.

    An answer depends on its prompt, the sampling and the number of equal prompts before it, not on the other prompts beyond
    rounding. Give all prompts in one call: equal prompts are computed once, and the engine chooses the number of rows. `earlier`
    counts the equal prompts of earlier calls.
    """

    def generate(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
        """Return the tokens of `sample`, called with the same options, without stop tokens."""

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        sampling: Sampling = GREEDY,
        earlier: Earlier | None = None,
        on_token: Callable[[int], None] | None = None,
        on_answer: Callable[[Answer], None] | None = None,
    ) -> list[Answer]:
        """Return the answer to each prompt. `on_token` is called with each new token of a single prompt, `on_answer` with
        each answer as it ends."""


@runtime_checkable
class DividesPrompts(Generates, Protocol):
    """A generating session whose processes can share the prompts of a step."""

    def own_prompts(self, count: int) -> Sequence[int]:
        """Return the indices of the prompts that this process answers, of `count` prompts: every size-th, or all of them for a
        sharded model, whose processes generate together."""

    def own_share(self, count: int) -> Sequence[int]:
        """Return every size-th index, for work on this process's host."""

    def gather_vectors(self, own: Mapping[int, Array]) -> list[Array]:
        """Return the float32 vectors of all processes in the order of their numbers. Every process calls this."""


class Task(Protocol):
    """The model and the loss of a recipe in one engine. The engine's `task.py` defines the argument types."""

    @property
    def metric_names(self) -> Sequence[str]:
        """Names of the metrics that `loss` returns."""

    def build(self, opening: Any) -> Any:
        """Return the model with its weights loaded."""

    def arrays(self, batch: Any) -> Mapping[str, Array]:
        """Return the host arrays of a batch that the loss reads."""

    def loss(self, model: Any, arrays: Mapping[str, Any]) -> tuple[Any, Mapping[str, tuple[Any, Any]]]:
        """Return the sum of the losses of a batch, not the mean, and metrics as name -> (sum, weight)."""


@runtime_checkable
class HasEvaluationData(Protocol):
    """A recipe whose evaluation data must be the same when a run is resumed."""

    def eval_identity(self) -> str | None:
        """Return a hash of the evaluation data; None if there is none."""


@runtime_checkable
class SkipsRows(Protocol):
    """A recipe that can skip rows it cannot read."""

    def skipped_rows(self) -> Sequence[str]:
        """Return the skipped rows, as JSON text: file, line and reason."""


@runtime_checkable
class Closes(Protocol):
    """A recipe that opens child processes or models for a run."""

    def close(self) -> None:
        """End them. The run calls this at its end, also after an error."""


@runtime_checkable
class RecordsBase(Protocol):
    """A task that trains on top of a base model."""

    def base_record(self) -> Mapping[str, Any]:
        """Return the identity and quantization of the base weights, for crosstune.json next to an adapter."""


@runtime_checkable
class HasOwnHead(Protocol):
    """A task whose head is trained in full, even with adapters on the other layers. Its result is a merged model."""

    head_names: Sequence[str]
    """The canonical names of the head's parameters."""


@runtime_checkable
class HasNotes(Protocol):
    """A session that produced notes for the user when it was opened."""

    notes: Sequence[str]


class Recipe(Protocol):
    """One kind of training without engine code: its data, batching and evaluation."""

    weight_name: str
    """The unit of a batch's weight, named as in metrics.jsonl: `supervised_tokens`, `examples`, ..."""

    def task(self, engine: str) -> Task:
        """Return the recipe's task for an engine; raise a UserError when there is none."""

    def longest_row(self) -> int:
        """Return the number of tokens in the longest row of the data."""

    def configure(self, config: Any) -> None:
        """Set the final resolved options; the data does not change."""

    def micro_batches(self, step: int) -> Sequence[Batch]:
        """Return the micro-batches of optimizer step `step`, counted from 0. They depend only on the step."""

    def num_steps(self) -> int: ...

    def describe(self) -> Mapping[str, Any]:
        """Return a description of the data for plan.json, the screen and the report."""

    def identity(self) -> str:
        """Return a hash of the training examples that does not depend on their location."""

    def order(self) -> Mapping[str, Any]:
        """Return everything, apart from the examples, that determines the examples of a step."""

    def position(self, step: int) -> Mapping[str, Any]:
        """Return the position in the data after `step` steps, in terms that do not depend on the machine."""

    def rows(self, step: int) -> list[int]:
        """Return the dataset indices of the examples of a step."""

    def evaluate(self, session: Session, *, observer: Observer) -> Evaluation: ...

    def complete_result(self, folder: Path) -> None:
        """Add files that other tools need to use the trained weights, such as a chat template."""


@runtime_checkable
class PreparesSession(Recipe, Protocol):
    """A recipe that measures the model before training, or before a checkpoint is restored."""

    def prepare_session(
        self, session: Session, *, folder: Path, earlier: Path | None, writes: bool, observer: Observer
    ) -> None:
        """Called on every rank with the opened model. `folder`: the run; `earlier`: the run that it continues; `writes`: on
        the rank that writes files."""


@runtime_checkable
class GivesVerdicts(Recipe, Protocol):
    """A recipe that recognizes problems of training. A verdict maps the name of a problem to a sentence of advice; an
    empty sentence means that the problem is over."""

    def judge_step(self, step: int, result: Backward) -> Mapping[str, str]:
        """Return verdicts after a step, counted from 1."""

    def judge_evaluation(self, evaluations: Mapping[int, Metrics]) -> Mapping[str, str]:
        """Return verdicts after an evaluation. `evaluations`: step -> metrics."""


@runtime_checkable
class GeneratesBatches(Recipe, Protocol):
    """A recipe that generates the batches of a step with the current weights, such as reinforcement learning.

    Batches depend only on the options, the weights, the step and the carried state: random numbers are drawn from the seed of
    the run and the step, so that a resumed run continues bit by bit. `micro_batches` still exists: it returns batches of the
    data alone, by which a move is checked.
    """

    def make_batches(self, session: Session, step: int, *, observer: Observer) -> Sequence[Batch]:
        """Return the micro-batches of step `step`, counted from 0: of all ranks, and equal on all of them. Called again with
        the same weights if the step did not fit into memory."""

    def batch_metrics(self, step: int) -> Metrics:
        """Return the metrics of the last generated batches, for metrics.jsonl: rewards, lengths, seconds."""

    def carried_state(self) -> Mapping[str, Array]:
        """Return the arrays, apart from the weights, that the next steps need, for a checkpoint; equal on all ranks."""

    def carry_on(self, state: Mapping[str, Array], *, step: int) -> None:
        """Load the arrays of a checkpoint that was written after `step` steps; empty in one by an earlier version."""


@runtime_checkable
class HasLongestRows(Recipe, Protocol):
    """A recipe for which `--batch_size auto` can be searched."""

    def num_rows(self) -> int:
        """Return the number of rows in an epoch."""

    def longest_target(self) -> int:
        """Return the maximum number of supervised tokens in a row."""

    def longest_batch(self, size: int) -> Batch:
        """Return a micro-batch of the longest rows of the data, repeated if there are too few."""


@runtime_checkable
class HasPictures(Recipe, Protocol):
    """A recipe whose rows may contain pictures."""

    def most_patches(self) -> int:
        """Return the maximum number of patches of the pictures in a row."""


@runtime_checkable
class HasMeanRow(Recipe, Protocol):
    """A recipe whose rows contain several tokenized examples."""

    def tokens_per_row(self) -> float:
        """Return the mean number of tokens of a row, without padding."""
