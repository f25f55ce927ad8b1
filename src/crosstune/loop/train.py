"""The training loop: take steps, evaluate, save and stop, for every recipe and engine."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from crosstune.checkpoint.write import SaveFailed
from crosstune.config.schema import Config
from crosstune.core.errors import NonFiniteError, PeerLost
from crosstune.core.events import (
    Evaluated,
    EvaluationStarted,
    NonFinite,
    Observer,
    SampleRow,
    StepMetrics,
    Stopped,
    TrainingEnded,
    TrainingStarted,
    Warned,
)
from crosstune.core.out_of_memory import EVALUATING, OutOfMemory, memory_errors
from crosstune.core.profiling import CHECKPOINT, DATA, EVALUATION, no_phase
from crosstune.core.protocols import (
    Backward,
    Evaluation,
    GeneratesBatches,
    GivesVerdicts,
    PreparedBatch,
    Recipe,
    Sample,
    Session,
    is_divided,
)
from crosstune.core.rewards import RewardUnavailable
from crosstune.core.schedule import Extension
from crosstune.files.run_record import RecordFailed
from crosstune.loop.deferred_errors import DeferredErrors
from crosstune.loop.prefetch import Generation, Prefetch
from crosstune.loop.profile import StepProfile
from crosstune.loop.progress import (
    Progress,
    best_step,
    early_stopping_message,
    evaluation_warning,
    stops_early,
)
from crosstune.loop.save import Checkpoints
from crosstune.loop.step import LossScale, describe_recovery, halve, rate_of_step, take_step
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.process.ranks import Group, SingleProcess


def _sample_row(sample: Sample) -> SampleRow:
    """Return a sample as a row of events.jsonl."""
    row = SampleRow(prompt=sample.prompt, answer=sample.answer, reference=sample.reference)
    if sample.score is not None:
        row["score"] = sample.score
    if sample.pictures:
        row["pictures"] = list(sample.pictures)
    return row | {"frames": list(sample.frames)} if sample.frames else row


@dataclass(kw_only=True)
class Training:
    """The training of one run."""

    session: Session
    recipe: Recipe
    config: Config
    observer: Observer
    stop: StopSignal
    progress: Progress
    checkpoints: Checkpoints
    deadline: float | None = None
    """The time by which the run must end, on the clock of `time.monotonic`."""
    group: Group = field(default_factory=SingleProcess)
    scale: LossScale = field(default_factory=lambda: LossScale(enabled=False))
    extension: Extension | None = None
    evaluates_first: bool = False
    profile: StepProfile | None = None
    _reported_problem: str = ""

    def run(self) -> None:
        """Run the remaining steps; a stop writes a checkpoint. The progress is always up to date."""
        progress, num_steps = self.progress, self.recipe.num_steps()
        try:
            with memory_errors(doing="the training"):  # of the recipe; a session converts its own
                self._run(num_steps)
        except StopRequested:
            progress.status = "stopped"
            self.save(wait=True)
            self.observer.on_event(Stopped(reason=self.stop.reason, step=progress.steps, num_steps=num_steps))
        except (NonFiniteError, OutOfMemory, PeerLost, RecordFailed, RewardUnavailable) as error:
            try:
                if self._can_save_after(error):
                    self.save(wait=True)  # the weights of the last completed step are intact
                self.checkpoints.finish()  # an earlier write may still be in progress
            except (SaveFailed, RecordFailed, OutOfMemory):  # already reported, if possible
                raise error from None
            finally:
                self._deferred.problem = None
            raise
        except BaseException:
            with contextlib.suppress(SaveFailed):  # already reported as an event
                self.checkpoints.finish()  # the writing thread would die with the process
            raise
        self.checkpoints.finish()
        self._deferred.check()

    @property
    def _deferred(self) -> DeferredErrors:
        return self.checkpoints.deferred

    def _can_save_after(self, error: BaseException) -> bool:
        """Return True if the state can be exported: a sharded state needs every rank, but an error may occur on one rank only."""
        return not is_divided(self.session) or isinstance(error, (NonFiniteError, RecordFailed))

    def _run(self, num_steps: int) -> None:
        progress = self.progress
        if not progress.steps:
            progress.eval_before = self._evaluate(when="before")
        self.observer.on_event(TrainingStarted(num_steps=num_steps, done=progress.steps))
        if (
            progress.steps not in progress.evaluations
        ):  # the run was stopped between a step and its evaluation
            self._evaluate_if_due(num_steps, is_due=self.evaluates_first)
        with contextlib.closing(self.profile) if self.profile is not None else contextlib.nullcontext():
            self._take_steps(num_steps)
        self.observer.on_event(TrainingEnded(steps=progress.steps))
        progress.status = "finished"  # even if the last evaluation does not fit into memory
        done = progress.eval_metrics.get(progress.steps) if progress.stopped_early else None
        progress.eval_after = done if done is not None else self._evaluate(when="after")

    def _take_steps(self, num_steps: int) -> None:
        progress = self.progress
        source = self._batches_from(progress.steps)
        try:
            while progress.steps < num_steps and not self._stops_early():
                self._check_stop()
                with self._profiled(progress.steps + 1):
                    self._start("data", step=progress.steps + 1)
                    started = time.perf_counter()
                    with self._saving_on_error(), self._phase(DATA):
                        window = source.micro_batches()
                    taken = self._take_step(progress.steps, window, made_s=time.perf_counter() - started)
                    if taken:
                        self._save_and_evaluate(num_steps)
                if taken:
                    continue
                source.close()  # its micro-batches are too large as well
                del window
                self._adopt_smaller()
                source = self._batches_from(progress.steps)
        finally:
            source.close()

    def _batches_from(self, first: int) -> Prefetch | Generation:
        """Return the micro-batches from step `first` on."""
        if isinstance(self.recipe, GeneratesBatches):
            return Generation(self.recipe, self.session, first=first, observer=self.observer, stop=self.stop)
        return Prefetch(self.recipe, self.session, first=first)

    def _profiled(self, step: int) -> contextlib.AbstractContextManager[None]:
        return self.profile.step(step) if self.profile is not None else no_phase("step")

    def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        return self.profile.phase(name) if self.profile is not None else no_phase(name)

    def _stops_early(self) -> bool:
        """Return True if the evaluations no longer improve; the same on every rank and after every resume."""
        progress = self.progress
        if not stops_early(progress.evaluations, patience=self.config.early_stopping):
            return False
        if not progress.stopped_early:
            progress.stopped_early = True
            message = early_stopping_message(progress.evaluations, patience=self.config.early_stopping)
            self.observer.on_event(Warned(message=message, step=progress.steps))
            if self._deferred.any(self.checkpoints.due_at_end(progress.steps)):
                self.save()
        return True

    def _check_stop(self) -> None:
        self._start("start", step=self.progress.steps + 1)
        reserve_s = self.progress.longest_step_s + self.checkpoints.longest_save_s
        if self.deadline is not None and time.monotonic() + reserve_s >= self.deadline:
            self.stop.request("the time limit")
        self._stop_together()

    def _stop_together(self) -> None:
        """Stop all ranks if one of them was asked to stop."""
        if self._deferred.any(self.stop.requested):
            self.stop.request("another process of the run")
            raise StopRequested(self.stop.reason)

    def _save_and_evaluate(self, num_steps: int) -> None:
        """Save before evaluating, so that being killed during a long evaluation loses no steps."""
        done = self.progress.steps
        self.checkpoints.poll()
        save_last = done == num_steps and self.checkpoints.due_at_end(done)
        if self._deferred.any(save_last or self.checkpoints.due(done)):
            self.save()
        self._evaluate_if_due(num_steps)

    def _evaluate_if_due(self, num_steps: int, *, is_due: bool = False) -> None:
        every, done = self.config.eval_steps, self.progress.steps
        if 0 < done < num_steps and (is_due or (every and done % every == 0)):
            self._evaluate(when="during")

    @contextlib.contextmanager
    def _saving_on_error(self) -> Iterator[None]:
        """Write a checkpoint if the recipe raises: the weights of the last completed step are intact.

        Skipped if the run keeps no checkpoints, or if the state is sharded, since the other ranks keep training.
        """
        try:
            yield
        except (StopRequested, OutOfMemory, PeerLost, MemoryError, KeyboardInterrupt, SystemExit):
            raise  # `run` saves for the first four; the others end the process
        except BaseException:
            keeps = self.checkpoints.policy.at_end or self.checkpoints.newest is not None
            if keeps and not is_divided(self.session):
                with contextlib.suppress(SaveFailed):  # already reported as an event
                    self.save(wait=True)
            raise

    def _start(self, name: str, *, step: int | None = None) -> None:
        """Report the current activity to the watchdog."""
        self.group.activity.start(f"step {step if step is not None else self.progress.steps}: {name}")

    def save(self, *, wait: bool = False) -> None:
        """Save the current step, unless a checkpoint has it."""
        progress = self.progress
        if progress.steps > self.checkpoints.last_step:
            self._start("checkpoint")
            with self._phase(CHECKPOINT):
                self.checkpoints.save(
                    self.session,
                    progress.steps,
                    evaluations=progress.evaluations,
                    wait=wait,
                    carried=self.recipe.carried_state()
                    if isinstance(self.recipe, GeneratesBatches)
                    else None,
                )

    def _take_step(self, step: int, window: Sequence[PreparedBatch], *, made_s: float) -> bool:
        """Take a step; return False if it must be repeated with smaller micro-batches. `made_s`: the time for its batches,
        which is a part of the step if they were generated for it."""
        num_steps = self.recipe.num_steps()
        lr = rate_of_step(step, self.config, num_steps=num_steps, extension=self.extension)
        started, cpu_started = time.perf_counter(), time.process_time()
        try:
            result: Backward | None = take_step(
                self.session,
                window,
                lr=lr,
                scale=self.scale,
                starting=lambda name: self._start(name, step=step + 1),
            )
        except NonFiniteError as error:
            self._find_nonfinite(error, step, window)
            result = None
        except OutOfMemory as error:
            self._choose_smaller(error, step=step + 1)
            return False
        step_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
        if isinstance(self.recipe, GeneratesBatches):
            found = {**self.recipe.batch_metrics(step), "time/train_s": step_s}
            result = replace(result, metrics={**found, **result.metrics}) if result else None
            step_s += made_s
        if self.profile is not None:
            self.profile.note_step_time(step_s)
        memory = self.session.memory()
        self.progress.add(result, step_s=step_s, memory=memory)
        row: dict[str, Any] = {
            "step": step + 1,
            "loss": result.loss if result else None,
            "tokens": result.num_tokens if result else 0,
            self.recipe.weight_name: result.weight if result else 0,
            "lr": lr,
            "grad_norm": result.grad_norm if result else None,
            "step_s": step_s,
            "cpu_s": cpu_s,
            "tokens_per_s": result.num_tokens / step_s if result else 0.0,
            "memory_bytes": memory.used_bytes,
            **(result.metrics if result else {"skipped": True}),
        }
        if (epoch := self.recipe.position(step + 1).get("epochs_done")) is not None:
            row["epoch"] = epoch
        self.observer.on_step(cast(StepMetrics, row))  # plus the recipe's weight and the task's metrics
        if result is not None and isinstance(self.recipe, GivesVerdicts):
            self._give_verdicts(self.recipe.judge_step(step + 1, result))
        return True

    def _choose_smaller(self, error: OutOfMemory, *, step: int) -> None:
        """Halve the micro-batches; raise the error if that is impossible, --strict is set, or other ranks lack the error."""
        alone = self.group.ranks.size == 1
        smaller = halve(self.config, doing=error.doing) if alone or error.shared else None
        if smaller is None or self.config.strict:
            raise error
        event = describe_recovery(error, smaller, step=step)
        self.config = smaller
        self.progress.recoveries.append(event.to_json())
        self.observer.on_event(event)

    def _adopt_smaller(self) -> None:
        """Configure the recipe with smaller micro-batches."""
        gc.collect()  # arrays in reference cycles with the frames of the error
        self.recipe.configure(self.config)

    def _find_nonfinite(self, error: NonFiniteError, step: int, window: Sequence[PreparedBatch]) -> None:
        """Report the examples and the layer that caused a non-finite value; raise unless the step may be skipped."""
        allowed = self.config.skip_nonfinite
        skipped = self.progress.skipped < allowed
        cause = self.session.find_nonfinite(window)
        self.observer.on_event(
            NonFinite(
                step=step + 1,
                error=error.message,
                blame=cause,
                examples=self.recipe.rows(step),
                skipped=skipped,
                allowed=allowed,
            )
        )
        if not skipped:
            raise error.with_blame(cause, num_skipped=self.progress.skipped) from None

    def _evaluate(self, *, when: str) -> Mapping[str, float]:
        if self.config.skip_eval:
            return {}
        step, started = self.progress.steps, time.perf_counter()
        self._stop_together()
        self._start("evaluation")
        self.observer.on_event(EvaluationStarted(step=step, when=when))
        with self._phase(EVALUATION), self._saving_on_error(), self.stop.interruptible():
            while (evaluation := self._try_to_evaluate()) is None:
                self._adopt_smaller()
        if not evaluation.metrics:
            return {}
        self.observer.on_event(
            Evaluated(
                step=step,
                when=when,
                metrics=dict(evaluation.metrics),
                samples=[_sample_row(sample) for sample in evaluation.samples],
                seconds=time.perf_counter() - started,
                intervals=dict(evaluation.intervals) or None,
            )
        )
        self.progress.add_evaluation(step, evaluation.metrics)
        self.progress.intervals = evaluation.intervals
        if when != "before":
            self._keep_best(step)
        self._warn_of_evaluation(step)
        return evaluation.metrics

    def _try_to_evaluate(self) -> Evaluation | None:
        """Return None if the evaluation must be repeated with smaller micro-batches."""
        try:
            with memory_errors(doing=EVALUATING):  # the session converts its own
                return self.recipe.evaluate(self.session, observer=self.observer)
        except OutOfMemory as error:
            self._choose_smaller(error, step=self.progress.steps)
            return None

    def _keep_best(self, step: int) -> None:
        """Save the weights if they are the best so far, since the result is made from them."""
        wanted = self.config.result != "last" and self.config.eval_steps > 0
        if wanted and best_step(self.progress.evaluations) == step and step < self.recipe.num_steps():
            self.save()

    def _warn_of_evaluation(self, step: int) -> None:
        """Warn about overfitting, a non-finite loss or a verdict of the recipe, once until an evaluation is better."""
        if isinstance(self.recipe, GivesVerdicts):
            self._give_verdicts(self.recipe.judge_evaluation(self.progress.eval_metrics))
        word, message = evaluation_warning(self.progress.evaluations)
        if word and word != self._reported_problem:
            self.observer.on_event(Warned(message=message, step=step))
        self._reported_problem = word

    def _give_verdicts(self, found: Mapping[str, str]) -> None:
        known = self.progress.verdicts
        for name, sentence in found.items():
            if sentence and name not in known:
                self.observer.on_event(Warned(message=sentence, step=self.progress.steps))
            if sentence:
                known[name] = sentence
            else:
                known.pop(name, None)
