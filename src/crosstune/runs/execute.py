"""Execute a run from loading its model to saving its result, recording it however it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.folders import clear_leftovers
from crosstune.checkpoint.read import Checkpoint, find_run
from crosstune.checkpoint.rotate import Keep
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.options.run import mismatches
from crosstune.config.plan import Plan
from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.events import (
    CheckpointSetAside,
    Event,
    Failed,
    Interrupted,
    Loaded,
    Loading,
    Moved,
    Observer,
    Observers,
    ResultSaved,
    Resumed,
    StepMetrics,
    Stopped,
    Warned,
)
from crosstune.core.measured import Measured
from crosstune.core.out_of_memory import LOADING, OutOfMemory, memory_errors
from crosstune.core.protocols import Generates, Recipe, Session, SessionState
from crosstune.core.ranks import Alone, Group
from crosstune.core.record import Record, RecordFailed
from crosstune.core.scaling import LossScale, needs_loss_scale
from crosstune.loop import move_check
from crosstune.loop.progress import Progress
from crosstune.loop.save import Checkpoints, SavePolicy
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.loop.train import Deadline, Training
from crosstune.runs import resume, same_training
from crosstune.runs.best_weights import best_weights
from crosstune.runs.memory_failure import with_advice
from crosstune.runs.save_result import clear_leftovers as clear_results
from crosstune.runs.save_result import cost_of_saving, save_result


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint a resumed run starts from, and how the run differs from it."""

    checkpoint: Checkpoint
    differences: Sequence[same_training.Difference]
    """Allowed by --allow_mismatch."""
    adapted: Sequence[same_training.Difference]
    """Expected on another backend."""
    changes: Sequence[same_training.Difference]
    measured: Measured | None
    """Loss of the next batches, measured on the machine of the checkpoint."""

    @property
    def step(self) -> int:
        return self.checkpoint.step

    def facts(self) -> dict[str, Any]:
        return {
            "checkpoint": str(self.checkpoint.folder),
            "step": self.step,
            "backend": self.checkpoint.manifest["backend"],
            "adapted": [difference.sentence() for difference in self.adapted],
            "allowed_differences": [difference.sentence() for difference in self.differences],
            "changed_options": [change.sentence() for change in self.changes],
        }


@dataclass(kw_only=True)
class Execution:
    """Load, train and save, recording the run however it ends.

    Every process executes the run; the first one writes.
    """

    plan: Plan
    recipe: Recipe
    open_model: Callable[[], Session]
    record: Record
    observer: Observer
    start: Start | None
    described: Mapping[str, Any]
    deadline: Deadline | None
    group: Group = field(default_factory=Alone)
    stop: StopSignal = field(default_factory=StopSignal)
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are kept."""
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        self.ranks = self.group.ranks
        self.scale = LossScale(enabled=needs_loss_scale(self.plan.precision))

    def run(self) -> dict[str, Any]:
        """Execute the run and return its summary."""
        plan, record = self.plan, self.record
        carried = self.start.checkpoint.manifest["progress"] if self.start else {}
        self.progress = Progress.from_manifest(carried, weight_name=self.recipe.weight_name)
        stop = self.stop
        stop.shared = self.ranks.size > 1
        extra: dict[str, Any] = {"name": record.folder.name, "backend": plan.backend.name}
        extra |= {"engine": plan.engine, "checkpoint": None, "result": None}
        if warnings := self.described.get("warnings"):
            extra["warnings"] = warnings
        with stop.listening():
            self._execute(stop, extra)
        return self.progress.summary() | extra

    def _execute(self, stop: StopSignal, extra: dict[str, Any]) -> None:
        """Execute the run and record how it ends. Fills `extra` with the summary's fields besides the progress."""
        plan, record, observer = self.plan, self.record, self.observer
        self._started = time.perf_counter() - self.progress.wall_s
        try:
            self.checkpoints = self._open_checkpoints()
            session = self._load(stop)
            extra["trained_parameters"], extra["parameters"] = session.num_parameters()
            extra["generates"] = isinstance(session, Generates)
            observer.on_event(
                Loaded(
                    name=record.folder.name,
                    backend=plan.backend.name,
                    engine=plan.engine,
                    checkpoint=None,
                    result=None,
                    trained_parameters=extra["trained_parameters"],
                    parameters=extra["parameters"],
                )
            )
            if self.start is not None:
                self._restore(session, self.start)
            self.failure = self._train(session, stop)
            if self.failure is not None:
                extra["error"] = str(self.failure)
                observer.on_event(Failed(error=str(self.failure), step=self.progress.steps))
            extra["checkpoint"] = self._newest()
            if plan.config.save_model and self.progress.steps:
                self._write_result(session, extra)
        except StopRequested:
            self.progress.status = "stopped"
            observer.on_event(
                Stopped(reason=stop.reason, step=self.progress.steps, num_steps=self.recipe.num_steps())
            )
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            self.progress.status = "stopped" if stopped else "failed"
            extra["error"] = f"{type(error).__name__}: {error}"
            extra["checkpoint"] = self._newest()
            with contextlib.suppress(RecordFailed):  # the record itself may have failed
                ending = Interrupted if stopped else Failed
                record.on_event(ending(error=extra["error"], step=self.progress.steps))
            raise
        finally:
            if self.progress.status == "stopped" and stop.requested:
                extra["stop_reason"] = stop.reason
            extra["seconds"] = self.progress.wall_s = time.perf_counter() - self._started
            record.finish(self.progress.summary() | extra)

    def _write_result(self, session: Session, extra: dict[str, Any]) -> None:
        """Write the best or the last weights as the result, and record which."""
        runs = [self.record.folder]
        if self.start is not None:
            runs.append(find_run(self.start.checkpoint.folder))
        chosen, best = best_weights(self.plan.config, self.progress, runs, self.observer)
        extra["best"], extra["last"] = (self._evaluation(step) for step in (best, self.progress.steps))
        if self.group.any(chosen is not None):
            self._keep_last(session)
        elif not self._is_good(session):
            return
        if chosen is not None:
            session.import_weights(chosen.load().weights)
        step = chosen.step if chosen is not None else self.progress.steps
        if (result := self._save_result(session)) is not None:
            extra["result"], extra["result_step"] = str(result), step
            costs = cost_of_saving(result)
            self.observer.on_event(ResultSaved(path=str(result), step=step, against_trained=costs))

    def _evaluation(self, step: int | None) -> dict[str, Any] | None:
        found = self.progress.eval_metrics.get(step) if step is not None else None
        return {"step": step, "metrics": found} if found is not None else None

    def _keep_last(self, session: Session) -> None:
        """Save the last weights in a checkpoint, if they are replaced for the result: the run may be continued."""
        assert self.checkpoints is not None
        if self.progress.steps > self.checkpoints.last_step and self._is_good(session):
            with contextlib.suppress(SaveFailed):  # already reported as an event
                self._save_checkpoint(session)

    def _save_checkpoint(self, session: Session) -> None:
        assert self.checkpoints is not None
        self.checkpoints.save(
            session,
            self.progress.steps,
            evaluations=self.progress.evaluations,
            facts={"loss_scale": self.scale.to_json()},
            wait=True,
        )

    def _load(self, stop: StopSignal) -> Session:
        self.group.activity.start("loading the model")
        self.observer.on_event(Loading(model=self.described["model"]["name"]))
        try:
            with stop.droppable(), memory_errors(doing=LOADING):
                return self.open_model()
        except OutOfMemory as error:
            raise with_advice(error, self.plan, longest_row=self.recipe.longest_row()) from error

    def _train(self, session: Session, stop: StopSignal) -> UserError | None:
        """Train, and return the error that ended it early if the weights are still usable."""
        assert self.checkpoints is not None
        training = Training(
            session=session,
            recipe=self.recipe,
            config=self.plan.config,
            observer=Observers([_FirstStep(self._set_later_aside), self.observer]),
            stop=stop,
            progress=self.progress,
            checkpoints=self.checkpoints,
            deadline=self.deadline,
            group=self.group,
            scale=self.scale,
        )
        self._rate = training.rate
        try:
            training.run()
        except OutOfMemory as error:
            return with_advice(error, self.plan, longest_row=self.recipe.longest_row())
        except (NonFiniteError, PeerLost, SaveFailed) as error:
            return error
        return None

    def _restore(self, session: Session, start: Start) -> None:
        """Import the state of the checkpoint into a new session."""
        self.group.activity.start("restoring the checkpoint")
        config, allowed = self.plan.config, set(mismatches(self.plan.config.allow_mismatch))
        state = resume.fitting_state(
            start.checkpoint.load(),
            current=session.export_state(copy=False).weights if "trainable" in allowed else None,
            optimizer=config.optimizer,
            moments=not any(difference.kind == "optimizer" for difference in start.differences),
        )
        session.import_state(state)
        self.scale.load(state.facts.get("loss_scale") or self.scale.to_json())
        if "trainable" in allowed:
            self._report_restored(start, state)
        manifest = start.checkpoint.manifest
        self.observer.on_event(Resumed(**start.facts(), engine=manifest["engine"]))
        if manifest["backend"] != self.plan.backend.name or start.measured is not None:
            self._compare_machines(session, start, allowed="loss" in allowed)

    def _report_restored(self, start: Start, state: SessionState) -> None:
        stored = start.checkpoint.manifest["trainable"]
        fits = [n for n, a in state.weights.items() if stored.get(n, {}).get("shape") == list(a.shape)]
        message = (
            f"{len(fits)} of {len(state.weights)} trained arrays come from the checkpoint; the others are new"
        )
        self.observer.on_event(Warned(message=message))

    def _compare_machines(self, session: Session, start: Start, *, allowed: bool) -> None:
        """Compare the loss of the same batches on both machines before a moved run continues."""
        if start.measured is None:
            message = (
                f"the effect of the move from {start.checkpoint.manifest['backend']} was not measured; "
                "`crosstune move` measures it"
            )
            self.observer.on_event(Warned(message=message))
            return
        here = move_check.measure(
            session,
            self.recipe,
            step=start.step,
            like=start.measured,
            backend=self.plan.backend.name,
            precision=self.plan.precision,
            quantization=same_training.quantization_name(self.plan),
        )
        compared = move_check.compare(start.measured, here)
        self.observer.on_event(Moved(comparison=compared))
        move_check.check(compared, allowed=allowed)

    def _open_checkpoints(self) -> Checkpoints:
        config, root = self.plan.config, self.record.folder / CHECKPOINTS
        if self.ranks.first:
            self._clean_up(root)
        checkpoints = Checkpoints(
            root,
            policy=SavePolicy(
                every_steps=config.save_steps,
                every_s=60 * config.save_minutes,
                at_end=config.save_steps > 0 or config.resume != "none" or self._is_small(),
                keep=Keep(
                    last_n=config.keep_last_n,
                    best=config.keep_best or config.result != "last",
                    every=config.keep_every,
                ),
                stop_on_error=config.on_save_error == "stop",
            ),
            fields=self._fields,
            observer=self.observer,
            group=self.group,
        )
        checkpoints.last_step = self.start.step if self.start else 0
        return checkpoints

    def _is_small(self) -> bool:
        """Return whether to save at the end by default: adapter state is small, a full model's is three times the model."""
        return self.plan.method in ("lora", "dora") and self.plan.config.save_minutes > 0

    def _clean_up(self, root: Path) -> None:
        """Remove leftovers of killed processes."""
        clear_leftovers(root)
        clear_results(self.record.folder)

    def _set_later_aside(self) -> None:
        """Set aside the checkpoints after the one to continue from, whose steps are trained again."""
        if not self.ranks.first:
            return
        if self.start is not None and resume.continues_in_place(self.record.folder, self.start.checkpoint):
            for path in resume.settle_folder(self.record.folder, self.start.checkpoint):
                self.observer.on_event(CheckpointSetAside(path=str(path), step=self.start.step))

    def _newest(self) -> str | None:
        newest = self.checkpoints.newest if self.checkpoints is not None else None
        if newest is None and self.start is not None:
            newest = self.start.checkpoint.folder
        return str(newest) if newest is not None else None

    def _fields(self, step: int) -> dict[str, Any]:
        """Return the manifest of a checkpoint, except for the description of its files."""
        plan, config = self.plan, self.plan.config
        has_next = step < self.recipe.num_steps()
        return {
            "step": step,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "engine": plan.engine,
            "backend": plan.backend.name,
            "precision": plan.precision,
            "quantization": same_training.quantization_name(plan),
            "method": plan.method,
            "recipe": config.recipe,
            "identity": self.described["identity"],
            "schedule": {
                "name": config.lr_scheduler,
                "step": step,
                "num_steps": self.recipe.num_steps(),
                "next_lr": self._rate(step) if has_next else None,
            },
            "data": dict(self.recipe.position(step)),
            "progress": self.progress.to_manifest() | {"wall_s": time.perf_counter() - self._started},
            "asked": self.described["asked"],
            "options": self.described["options"],
            "versions": self.described["machine"].get("versions", {}),
            "resumed_from": self.described["resumed_from"],
        }

    def _is_good(self, session: Session) -> bool:
        """Return whether all weights are finite; only a failed run can have others. Exporting them may need every
        process, so they are not checked after a process was lost."""
        if self.failure is None or isinstance(self.failure, PeerLost):
            return True
        weights = session.export_state(copy=False).weights
        bad = next((name for name, array in weights.items() if not np.isfinite(array).all()), None)
        if bad is not None:
            message = f"no result is written: {bad} has non-finite values"
            self.observer.on_event(Warned(message=message, step=self.progress.steps))
        return bad is None

    def _save_result(self, session: Session) -> Path | None:
        """Write the result. If that fails, make sure that the weights are in a checkpoint, from which it can be made."""
        self.group.activity.start("saving the result")
        try:
            return save_result(session, self.recipe, self.record.folder, writes=self.ranks.first)
        except SaveFailed as error:
            assert self.checkpoints is not None
            if self.progress.steps > self.checkpoints.last_step and self.ranks.size == 1:
                with contextlib.suppress(SaveFailed):  # already reported as an event
                    self._save_checkpoint(session)
            if (newest := self._newest()) is None:
                raise
            kept = f"{error.do}; the newest checkpoint is {newest}, and --resume auto continues from it"
            raise SaveFailed(error.asked, why=error.why, do=kept) from error


class _FirstStep:
    """Call a function at the first completed step: a start that fails before it must change nothing."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def on_step(self, metrics: StepMetrics) -> None:
        act, self._act = self._act, None
        if act is not None:
            act()

    def on_event(self, event: Event) -> None:
        return None
