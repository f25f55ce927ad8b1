"""Execute a run from loading its model to saving its result, recording it however it ends."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.folders import clear_leftovers
from crosstune.checkpoint.manifest import Manifest
from crosstune.checkpoint.rotate import Keep
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.resolve.memory_advice import with_advice
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.events import (
    CheckpointSetAside,
    Failed,
    Interrupted,
    Loaded,
    Loading,
    Observer,
    Observers,
    ResultSaved,
    Stopped,
    Warned,
)
from crosstune.core.out_of_memory import LOADING, OutOfMemory, memory_errors
from crosstune.core.protocols import Generates, HasNotes, Session
from crosstune.core.weights import result_weights
from crosstune.files.run_record import Record, RecordFailed
from crosstune.loop.deferred_errors import DeferredErrors, KeepingErrors
from crosstune.loop.profile import StepProfile, is_asked, profile_folder
from crosstune.loop.progress import Progress
from crosstune.loop.save import Checkpoints, SavePolicy
from crosstune.loop.step import LossScale, needs_loss_scale
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.loop.train import Deadline, Training
from crosstune.planner.learned import learn_peak
from crosstune.process.ranks import Group
from crosstune.runs.open_parts import open_session
from crosstune.runs.prepare import PreparedRun
from crosstune.runs.restore import restore_session
from crosstune.runs.resume_identity import base_fields, identity_of_options, quantization_name
from crosstune.runs.save_result import best_weights, cost_of_saving, save_result
from crosstune.runs.save_result import clear_leftovers as clear_results
from crosstune.runs.watch_folder import FirstStep, FolderWatch
from crosstune.tracking.observe import Tracking


@runtime_checkable
class HasPlan(Protocol):
    """A session whose plan may say more about the base than the plan that it was opened with."""

    plan: Plan


@dataclass(kw_only=True)
class Execution:
    """Load, train and save, recording the run however it ends.

    Every process executes the run; the first one writes.
    """

    prepared: PreparedRun
    described: Mapping[str, Any]
    """The contents of plan.json."""
    record: Record
    observer: Observer
    deadline: Deadline | None
    group: Group
    stop: StopSignal
    tracking: Tracking
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are kept."""
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        self.plan, self.recipe = self.prepared.plan, self.prepared.recipe
        self.point, self.ranks = self.prepared.point, self.group.ranks
        self.deferred = DeferredErrors(self.group)
        if self.ranks.size > 1:
            self.observer = KeepingErrors(self.observer, self.deferred)
        self.scale = LossScale(enabled=needs_loss_scale(self.plan.precision))

    def run(self) -> dict[str, Any]:
        """Execute the run and return its summary."""
        plan, record = self.plan, self.record
        carried = self.point.manifest.progress if self.point is not None else {}
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
        """Execute the run and record how it ends. `extra` gets the summary's fields that are not in the progress."""
        plan, record, observer = self.plan, self.record, self.observer
        self._watch = FolderWatch(record.folder, found=self._write_to) if self.ranks.first else None
        self._started = time.perf_counter() - self.progress.wall_s
        try:
            self.checkpoints = self._open_checkpoints()
            session = self._load(stop)
            self._record_base(session)
            for note in session.notes if isinstance(session, HasNotes) else ():
                observer.on_event(Warned(message=note))
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
            if self.point is not None:
                self.group.activity.start("restoring the checkpoint")
                restore_session(
                    session,
                    self.point,
                    plan=self.plan,
                    recipe=self.recipe,
                    scale=self.scale,
                    observer=observer,
                )
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
            if self._went_as_planned():
                learn_peak(self.plan, self.progress.peak_memory_bytes)
            extra["seconds"] = self.progress.wall_s = time.perf_counter() - self._started
            if self._watch is not None:
                self.failure = self._watch.look() or self.failure
                self._watch.close()
            self.tracking.summarize(self.progress.summary() | extra)
            record.finish(self.progress.summary() | extra)

    def _went_as_planned(self) -> bool:
        """Return whether the peak memory of this run may correct later estimates."""
        progress = self.progress
        whole = progress.status == "finished" and progress.steps > 1
        return self.ranks.first and whole and not progress.recoveries

    def _write_result(self, session: Session, extra: dict[str, Any]) -> None:
        """Write the best or the last weights as the result, and record which."""
        self.group.meet()  # the first process has finished writing checkpoints
        runs = [Path(self.group.share(str(self.record.folder)))]
        if self.point is not None:
            runs.append(self.point.run)
        chosen, best = best_weights(self.plan.config, self.progress, runs, self.observer, group=self.group)
        extra["best"], extra["last"] = (self._evaluation(step) for step in (best, self.progress.steps))
        if chosen is not None:
            self._keep_last(session)
        elif not self._is_good(session):
            return
        if chosen is not None:
            session.import_weights(result_weights(chosen.load()))
        step = chosen.step if chosen is not None else self.progress.steps
        if (result := self._save_result(session)) is not None:
            extra["result"], extra["result_step"] = str(result), step
            costs = cost_of_saving(result)
            self.observer.on_event(ResultSaved(path=str(result), step=step, against_trained=costs))
        self.deferred.check()

    def _evaluation(self, step: int | None) -> dict[str, Any] | None:
        found = self.progress.eval_metrics.get(step) if step is not None else None
        return {"step": step, "metrics": found} if found is not None else None

    def _keep_last(self, session: Session) -> None:
        """Save the last weights in a checkpoint, if they are replaced for the result: the run may be continued."""
        assert self.checkpoints is not None
        if self.progress.steps > self.checkpoints.last_step and self._is_good(session):
            with contextlib.suppress(SaveFailed):  # already reported as an event
                self._save_checkpoint(session)
            self.deferred.forget_failed_save()

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
                return open_session(
                    self.plan,
                    self.prepared.model,
                    task=self.recipe.task(self.plan.engine),
                    group=self.group,
                )
        except OutOfMemory as error:
            raise with_advice(error, self.plan, longest_row=self.recipe.longest_row()) from error

    def _record_base(self, session: Session) -> None:
        """Record what opening the model decided about its base, in plan.json and in all checkpoints."""
        base = session.plan.base if isinstance(session, HasPlan) else None
        if base is None:
            return
        self.plan = replace(self.plan, base=base)
        quantization = identity_of_options(self.plan)["quantization"]
        identity = {**self.described["identity"], "quantization": quantization}
        self.described = {**self.described, "identity": identity, **base_fields(self.plan)}
        try:
            self.record.on_plan(self.described)
        except RecordFailed as error:
            self.deferred.keep(error)

    def _train(self, session: Session, stop: StopSignal) -> UserError | None:
        """Train, and return the error that ended it early if the weights are still usable."""
        assert self.checkpoints is not None
        watchers: list[Observer] = [FirstStep(self._set_later_aside), self.observer]
        watchers += [self._watch] if self._watch is not None else []
        training = Training(
            session=session,
            recipe=self.recipe,
            config=self.plan.config,
            observer=Observers(watchers),
            stop=stop,
            progress=self.progress,
            checkpoints=self.checkpoints,
            deadline=self.deadline,
            group=self.group,
            scale=self.scale,
            profile=self._open_profile(session),
        )
        self._rate = training.rate
        try:
            training.run()
        except OutOfMemory as error:
            ended = replace(self.plan, config=training.config)  # micro-batches may have become smaller
            advised = with_advice(error, ended, longest_row=self.recipe.longest_row())
            if self.ranks.size > 1 and not error.shared:  # the other processes wait elsewhere
                raise advised from error
            return advised
        except SaveFailed as error:
            if not self.group.any(self._watch is not None and self._watch.look() is not None):
                return error
            self.progress.status = "stopped"
            with contextlib.suppress(SaveFailed):  # already reported as an event
                self._save_checkpoint(session)
            self.deferred.forget_failed_save()
        except (NonFiniteError, PeerLost) as error:
            return error
        return self._watch.error if self._watch is not None else None

    def _open_profile(self, session: Session) -> StepProfile | None:
        """Return the profile of the first process; the others wait for it where they wait for each other."""
        config = self.plan.config
        if not is_asked(config) or not self.ranks.first:
            return None
        folder = profile_folder(config, self.record.folder)
        return StepProfile(
            session=session, config=config, folder=folder, observer=self.observer, engine=self.plan.engine
        )

    def _write_to(self, folder: Path) -> None:
        """Write to another folder from now on, and stop: the lock of the run does not hold there."""
        assert self.checkpoints is not None
        self.record.folder, self.checkpoints.root = folder, folder / CHECKPOINTS
        self.stop.request("the loss of its folder")

    def _open_checkpoints(self) -> Checkpoints:
        config, root = self.plan.config, self.record.folder / CHECKPOINTS
        # The state of adapters is small; that of a full model is three times the model.
        is_small = self.plan.method in ("lora", "dora") and config.save_minutes > 0
        if self.ranks.first:  # remove what killed processes left behind
            clear_leftovers(root)
            clear_results(self.record.folder)
        checkpoints = Checkpoints(
            root,
            policy=SavePolicy(
                every_steps=config.save_steps,
                every_s=60 * config.save_minutes,
                at_end=config.save_steps > 0 or config.resume != "none" or is_small,
                keep=Keep(
                    last_n=config.keep_last_n,
                    best=config.keep_best or config.result != "last",
                    every=config.keep_every,
                ),
                stop_on_error=config.on_save_error == "stop",
            ),
            manifest=self._manifest,
            observer=self.observer,
            group=self.group,
            deferred=self.deferred,
        )
        checkpoints.last_step = self.point.step if self.point is not None else 0
        return checkpoints

    def _set_later_aside(self) -> None:
        """Set aside the checkpoints after the one to continue from, whose steps are trained again."""
        if self.ranks.first and self.point is not None and self.point.is_in(self.record.folder):
            for path in self.point.set_later_aside():
                self.observer.on_event(CheckpointSetAside(path=str(path), step=self.point.step))

    def _newest(self) -> str | None:
        newest = self.checkpoints.newest if self.checkpoints is not None else None
        if newest is None and self.point is not None:
            newest = self.point.checkpoint.folder
        return str(newest) if newest is not None else None

    def _manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint, without its arrays and files."""
        plan, config, described = self.plan, self.plan.config, self.described
        num_steps = self.recipe.num_steps()
        return Manifest(
            step=step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            engine=plan.engine,
            backend=plan.backend.name,
            precision=plan.precision,
            quantization=quantization_name(plan),
            base=base_fields(plan),
            method=plan.method,
            recipe=config.recipe,
            identity=described["identity"],
            schedule={
                "name": config.lr_scheduler,
                "step": step,
                "num_steps": num_steps,
                "next_lr": self._rate(step) if step < num_steps else None,
            },
            data=dict(self.recipe.position(step)),
            progress=self.progress.to_manifest() | {"wall_s": time.perf_counter() - self._started},
            asked=described["asked"],
            options=described["options"],
            versions=described["machine"].get("versions", {}),
            resumed_from=described["resumed_from"],
        )

    def _is_good(self, session: Session) -> bool:
        """Return whether all weights are finite; only a failed run can have others. Exporting them may need every
        process, so they are not checked after a process was lost."""
        if isinstance(self.failure, PeerLost) or not self.group.any(self.failure is not None):
            return True
        weights = session.export_state(copy=False).weights
        bad = next((name for name, array in weights.items() if not np.isfinite(array).all()), None)
        if bad is not None:
            message = f"no result is written: {bad} has non-finite values"
            self.observer.on_event(Warned(message=message, step=self.progress.steps))
        return not self.group.any(bad is not None)

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
            raise SaveFailed(error.message, why=error.why, do=kept) from error
