"""Define the events of a run, one class each, and the observers that receive them.

An event's `kind` and `to_json()` are its row in events.jsonl. Reports read rows of older runs, so both are a file
format: add a class, or a field with a default, and keep existing names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, TypedDict

from crosstune.core.loss_measurement import Comparison, LossMeasurement


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    kind: ClassVar[str]
    """The name in events.jsonl. A row has `time`, `kind` and the fields of the event."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the row, except those with their default value."""
        values = {item.name: (getattr(self, item.name), item.default) for item in fields(self)}
        return {
            name: value for name, (value, default) in values.items() if default is MISSING or value != default
        }


@dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning for the user; the run continues."""

    kind = "warning"
    message: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class RewardPrinted(Event):
    """A reward function printed text; long output is cut."""

    kind = "reward_output"
    reward: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Adjusted(Event):
    """The resolver chose or changed an option; see `config.plan.Adjustment`."""

    kind = "adjustment"
    option: str
    asked: Any
    used: Any
    reason: str
    adjustment_kind: Literal["choice", "change", "warning", "name"]
    """`sort` in events.jsonl."""
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return {
            "sort" if name == "adjustment_kind" else name: value for name, value in super().to_json().items()
        }


@dataclass(frozen=True, kw_only=True)
class Preparing(Event):
    """A part of the preparation of a run begins. For the screen only."""

    kind = "preparing"
    doing: str


@dataclass(frozen=True, kw_only=True)
class ModelProgress(Event):
    """Bytes of a model were downloaded, converted, merged or otherwise processed."""

    kind = "model_progress"
    stage: str
    done: int
    total: int | None
    """None while the size is unknown."""
    model: str


@dataclass(frozen=True, kw_only=True)
class Tokenizing(Event):
    """A part of a dataset was tokenized."""

    kind = "tokenizing"
    source: str
    done_bytes: int
    total_bytes: int
    examples: int


@dataclass(frozen=True, kw_only=True)
class RunMovedAside(Event):
    """An older run was renamed to make room for this one."""

    kind = "moved_aside"
    path: str


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """The run folder exists and the data is ready."""

    kind = "start"
    folder: str
    data: Mapping[str, Any]
    """The recipe's description of its data."""
    num_steps: int
    processes: str = ""
    """A description of the run's processes; empty for a single process."""


@dataclass(frozen=True, kw_only=True)
class Loading(Event):
    """The engine begins to load the model."""

    kind = "loading"
    model: str


@dataclass(frozen=True, kw_only=True)
class Loaded(Event):
    """The model is on its device, with adapters and optimizer."""

    kind = "loaded"
    name: str | None
    """The run name; None without a run folder."""
    backend: str
    engine: str
    checkpoint: str | None
    result: str | None
    trained_parameters: int
    parameters: int
    optimizer: str = ""
    """Name of the optimizer, with "fused" if one kernel updates many weights."""


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The session has loaded the state of a checkpoint."""

    kind = "resumed"
    checkpoint: str
    step: int
    backend: str
    """The backend and engine that wrote the checkpoint."""
    adapted: Sequence[str]
    allowed_differences: Sequence[str]
    changed_options: Sequence[str]
    engine: str


@dataclass(frozen=True, kw_only=True)
class CheckpointSetAside(Event):
    """A checkpoint was renamed because the run continues from an earlier one, at `step`."""

    kind = "set_aside"
    path: str
    step: int


@dataclass(frozen=True, kw_only=True)
class LossMeasured(Event):
    """The loss on fixed batches was measured before a move."""

    kind = "measured"
    measured: LossMeasurement

    def to_json(self) -> dict[str, Any]:
        return self.measured.to_json()


@dataclass(frozen=True, kw_only=True)
class LossCompared(Event):
    """The loss on the same batches was measured with the target backend of a move."""

    kind = "compared"
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        return self.comparison.to_json()


class Moved(LossCompared):
    """A run continued on a different machine; the loss on the same batches was measured again."""

    kind = "moved"


@dataclass(frozen=True, kw_only=True)
class TrainingStarted(Event):
    """The first step follows; `done` steps were taken before a resume."""

    kind = "training"
    num_steps: int
    done: int


@dataclass(frozen=True, kw_only=True)
class TrainingEnded(Event):
    """The last step is done; an evaluation and the result may follow."""

    kind = "training_end"
    steps: int


@dataclass(frozen=True, kw_only=True)
class EvaluationStarted(Event):
    kind = "evaluation_start"
    step: int
    when: str
    """`before`, `during` or `after` training."""


@dataclass(frozen=True, kw_only=True)
class Evaluating(Event):
    """A part of an evaluation is done."""

    kind = "evaluating"
    done: int
    total: int
    what: str = "answers"
    stage: str = ""
    """The title of work outside an evaluation."""


class _SampleTexts(TypedDict):
    prompt: str
    answer: str
    reference: str


class SampleRow(_SampleTexts, total=False):
    """A generated answer and the expected answer."""

    frames: list[str]
    """The states of the answer while it was generated, if the recipe records them."""
    score: float
    """The reward of the answer, if the recipe has rewards."""
    pictures: list[str]
    """Thumbnails of the prompt's pictures, as data URIs."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    kind = "evaluation"
    step: int
    when: str
    metrics: Mapping[str, float]
    samples: Sequence[SampleRow]
    seconds: float
    intervals: Mapping[str, tuple[float, float]] | None = None
    """95 % intervals of some metrics."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    kind = "checkpoint"
    step: int
    path: str
    bytes: int
    blocked_s: float
    """Time that training waited."""
    seconds: float
    removed: Sequence[str]
    """Older checkpoints that rotation deleted."""


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    kind = "checkpoint_failed"
    step: int
    error: str


@dataclass(frozen=True, kw_only=True)
class NonFinite(Event):
    """The loss or the gradient of a step is not finite; the optimizer step was not taken."""

    kind = "nonfinite"
    step: int
    error: str
    blame: str
    """The layer or weight where it began."""
    examples: Sequence[int]
    skipped: bool
    allowed: int


@dataclass(frozen=True, kw_only=True)
class Profiled(Event):
    """Some steps were profiled; see `loop.profile` for the figures."""

    kind = "profile"
    path: str
    """The table in text form."""
    folder: str
    result: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Recovered(Event):
    """A step, or an evaluation after it, ran out of memory and is repeated with fewer rows at a time."""

    kind = "recovery"
    step: int
    doing: str
    cause: str
    changed: Mapping[str, int]
    """Option -> its value from now on."""
    next_time: str
    """The options that would have avoided it."""


@dataclass(frozen=True, kw_only=True)
class ResultSaved(Event):
    """The adapter or the model was exported."""

    kind = "saved"
    path: str
    step: int
    against_trained: Mapping[str, Mapping[str, Any]] | None = None
    """Name of saved weights -> their distance from the trained weights, if they differ."""


@dataclass(frozen=True, kw_only=True)
class Stopped(Event):
    """A signal or the time limit stopped the run gracefully."""

    kind = "stopped"
    reason: str
    step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Interrupted(Event):
    """Ctrl-C aborted the run."""

    kind = "stopped"
    error: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The run failed with an error."""

    kind = "failed"
    error: str
    step: int


class _StepRow(TypedDict):
    step: int
    loss: float | None
    tokens: int
    supervised_tokens: int
    lr: float
    grad_norm: float | None
    step_s: float
    tokens_per_s: float
    memory_bytes: int


class StepMetrics(_StepRow, total=False):
    """One row of metrics.jsonl. Loss and gradient norm are None for a skipped step."""

    skipped: bool
    epoch: float
    """Epochs trained so far, such as 1.5."""
    cpu_s: float
    """CPU time of the step in this process, over all threads."""


class Observer(Protocol):
    """Receives the steps and events of a run: the record on disk, the screen."""

    def on_event(self, event: Event) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...


@dataclass
class Observers:
    """Forward everything to multiple observers, in order."""

    members: list[Observer] = field(default_factory=list)

    def on_event(self, event: Event) -> None:
        for member in self.members:
            member.on_event(event)

    def on_step(self, metrics: StepMetrics) -> None:
        for member in self.members:
            member.on_step(metrics)
