"""Execute a prepared run: load the model, restore the checkpoint, train, save the result, record the outcome."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.folders import clear_leftovers
from crosstune.checkpoint.manifest import Manifest
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.resolve.memory_advice import with_advice
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import NonFiniteError, PeerLost, UserError
from crosstune.core.events import (
    CheckpointSetAside,
    Event,
    Failed,
    Interrupted,
    Loaded,
    Loading,
    Observer,
    ResultSaved,
    StepMetrics,
    Stopped,
    Warned,
)
from crosstune.core.out_of_memory import LOADING, OutOfMemory, memory_errors
from crosstune.core.profiling import Profiles
from crosstune.core.protocols import Closes, Generates, HasNotes, PreparesSession, Session
from crosstune.core.rewards import RewardUnavailable
from crosstune.core.weights import result_weights
from crosstune.files.run_record import Record, RecordFailed
from crosstune.loop.deferred_errors import DeferredErrors, DeferringObserver
from crosstune.loop.profile import StepProfile, is_asked, profile_folder
from crosstune.loop.progress import Progress
from crosstune.loop.save import Checkpoints, SavePolicy
from crosstune.loop.step import LossScale, needs_loss_scale, rate_of_step
from crosstune.loop.stop import StopRequested, StopSignal
from crosstune.loop.train import Training
from crosstune.models.identity import read_record
from crosstune.planner.measurements import record_peak
from crosstune.process.ranks import Group
from crosstune.runs.open_parts import open_session
from crosstune.runs.prepare import PreparedRun
from crosstune.runs.restore import restore_session
from crosstune.runs.resume_identity import base_fields, identity_of_options, quantization_name
from crosstune.runs.save_result import best_weights, find_bad_weight, save_result
from crosstune.runs.save_result import clear_leftovers as clear_results
from crosstune.runs.watch_folder import FolderWatch
from crosstune.tracking.observe import Tracking


@dataclass(kw_only=True)
class Execution:
    """One run from loading to its result. Every rank executes it; rank 0 writes."""

    prepared: PreparedRun
    described: Mapping[str, Any]
    """The contents of plan.json."""
    record: Record
    observer: Observer
    deadline: float | None
    group: Group
    stop: StopSignal
    tracking: Tracking
    failure: UserError | None = None
    """The error that ended the run early; all steps before it are saved."""

    def __post_init__(self) -> None:
        self.plan, self.recipe = self.prepared.plan, self.prepared.recipe
        self.point, self.ranks = self.prepared.point, self.group.ranks
        self.stop.shared = self.ranks.size > 1
        self.deferred = DeferredErrors(self.group)
        if self.ranks.size > 1:
            self.observer = DeferringObserver(self.observer, self.deferred)
        carried = self.point.manifest.progress if self.point is not None else {}
        self.progress = Progress.from_manifest(carried, weight_name=self.recipe.weight_name)
        self.scale = LossScale(enabled=needs_loss_scale(self.plan.precision))
        self.checkpoints = Checkpoints(
            self.record.folder / CHECKPOINTS,
            policy=SavePolicy.from_config(self.plan.config, method=self.plan.method),
            manifest=self._manifest,
            observer=self.observer,
            group=self.group,
            deferred=self.deferred,
        )
        self.checkpoints.last_step = self.point.step if self.point is not None else 0
        self.extra: dict[str, Any] = {
            "name": self.record.folder.name,
            "backend": self.plan.backend.name,
            "engine": self.plan.engine,
            "checkpoint": None,
            "result": None,
        }
        """The fields of summary.json that are not in the progress."""
        if warnings := self.described.get("warnings"):
            self.extra["warnings"] = warnings
        self._is_first_step = True

    def run(self) -> dict[str, Any]:
        """Execute the run and return its summary."""
        self._started = time.perf_counter() - self.progress.wall_s
        self._watch = FolderWatch(self.record.folder, enabled=self.ranks.first, on_lost=self._write_to)
        closing = (
            contextlib.closing(self.recipe) if isinstance(self.recipe, Closes) else contextlib.nullcontext()
        )
        with self.stop.listening(), self._recording_end(), closing:
            if self.ranks.first:
                clear_leftovers(self.checkpoints.root)
                clear_results(self.record.folder)
            session = self._load()
            if isinstance(self.recipe, PreparesSession):
                self.group.activity.start("measuring the model before training")
                with self.stop.interruptible():
                    self.recipe.prepare_session(
                        session,
                        folder=self.record.folder,
                        earlier=self.point.run if self.point is not None else None,
                        writes=self.ranks.first,
                        observer=self.observer,
                    )
            if self.point is not None:
                self.group.activity.start("restoring the checkpoint")
                restore_session(
                    session,
                    self.point,
                    plan=self.plan,
                    recipe=self.recipe,
                    scale=self.scale,
                    observer=self.observer,
                )
            self.failure = self._train(session)
            if self.failure is not None:
                self.extra["error"] = str(self.failure)
                self.observer.on_event(Failed(error=str(self.failure), step=self.progress.steps))
            self.extra["checkpoint"] = self._newest()
            if self.plan.config.save_model and self.progress.steps:
                self._write_result(session)
        return self.progress.summary() | self.extra

    @contextlib.contextmanager
    def _recording_end(self) -> Iterator[None]:
        """Record how the run ends: finished, stopped or failed."""
        progress, extra = self.progress, self.extra
        try:
            yield
        except StopRequested:
            progress.status = "stopped"
            self.observer.on_event(
                Stopped(reason=self.stop.reason, step=progress.steps, num_steps=self.recipe.num_steps())
            )
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            progress.status = "stopped" if stopped else "failed"
            extra["error"] = f"{type(error).__name__}: {error}"
            extra["checkpoint"] = self._newest()
            with contextlib.suppress(RecordFailed):  # the record itself may have failed
                ending = Interrupted if stopped else Failed
                self.record.on_event(ending(error=extra["error"], step=progress.steps))
            raise
        finally:
            if progress.status == "stopped" and self.stop.requested:
                extra["stop_reason"] = self.stop.reason
            complete = progress.status == "finished" and progress.steps > 1 and not progress.recoveries
            if complete and self.ranks.first:
                record_peak(self.plan, progress.peak_memory_bytes)
            extra["seconds"] = progress.wall_s = time.perf_counter() - self._started
            self.failure = self._watch.look() or self.failure
            self._watch.close()
            self.tracking.summarize(progress.summary() | extra)
            self.record.finish(progress.summary() | extra)

    def _load(self) -> Session:
        """Open the model and report its size."""
        plan = self.plan
        self.group.activity.start("loading the model")
        self.observer.on_event(Loading(model=self.described["model"]["name"]))
        try:
            with self.stop.interruptible(), memory_errors(doing=LOADING):
                task = self.recipe.task(plan.engine)
                session = open_session(plan, self.prepared.model, task=task, group=self.group)
        except OutOfMemory as error:
            raise with_advice(error, plan, longest_row=self.recipe.longest_row()) from error
        opened: Plan | None = getattr(session, "plan", None)  # completed while the model was opened
        if opened is not None and opened.base is not None:
            self.plan = replace(plan, base=opened.base)
            self._record_base()
        for note in session.notes if isinstance(session, HasNotes) else ():
            self.observer.on_event(Warned(message=note))
        trained, total = session.num_parameters()
        facts = {key: self.extra[key] for key in ("name", "backend", "engine", "checkpoint", "result")}
        sizes: dict[str, Any] = {"trained_parameters": trained, "parameters": total}
        self.extra |= {**sizes, "generates": isinstance(session, Generates)}
        optimizer = getattr(session, "optimizer_name", plan.config.optimizer)
        self.observer.on_event(Loaded(**facts, **sizes, optimizer=optimizer))
        return session

    def _record_base(self) -> None:
        """Record in plan.json and all checkpoints which layers of the base are quantized."""
        quantization = identity_of_options(self.plan)["quantization"]
        identity = {**self.described["identity"], "quantization": quantization}
        self.described = {**self.described, "identity": identity, **base_fields(self.plan)}
        try:
            self.record.on_plan(self.described)
        except RecordFailed as error:
            self.deferred.keep(error)

    def _train(self, session: Session) -> UserError | None:
        """Train, and return the error that ended it early if the weights are still usable."""
        config, profile = self.plan.config, None
        if is_asked(config) and self.ranks.first:
            folder = profile_folder(config, self.record.folder)
            assert isinstance(session, Profiles), "both engines can be profiled"
            profile = StepProfile(
                session=session,
                config=config,
                folder=folder,
                observer=self.observer,
                engine=self.plan.engine,
                stop=self.stop,
            )
        self.training = Training(
            session=session,
            recipe=self.recipe,
            config=config,
            observer=self,
            stop=self.stop,
            progress=self.progress,
            checkpoints=self.checkpoints,
            deadline=self.deadline,
            group=self.group,
            scale=self.scale,
            extension=self.prepared.extension,
            evaluates_first=self._extends(),
            profile=profile,
        )
        try:
            self.training.run()
        except OutOfMemory as error:
            ended = replace(self.plan, config=self.training.config)  # micro-batches may have become smaller
            advised = with_advice(error, ended, longest_row=self.recipe.longest_row())
            if self.ranks.size > 1 and not error.shared:  # the other ranks wait elsewhere
                raise advised from error
            return advised
        except SaveFailed as error:
            if not self.group.any(self._watch.look() is not None):
                # Also if only the last checkpoint is missing: --resume auto starts anew.
                self.progress.status = "failed"
                return error
            self.progress.status = "stopped"
            self.checkpoints.last_step = 0  # the last step is in no checkpoint
            self._save_last()
        except RewardUnavailable as error:
            if self.ranks.size > 1:  # the other ranks wait for the scores
                raise
            return error
        except (NonFiniteError, PeerLost) as error:
            return error
        return self._watch.error

    def on_event(self, event: Event) -> None:
        self.observer.on_event(event)

    def on_step(self, metrics: StepMetrics) -> None:
        """Observe a step: rename the checkpoints after the resumed one at the first step, and check the run folder."""
        point, self._is_first_step, is_first = self.point, False, self._is_first_step
        # A start that fails before its first step must change nothing.
        if is_first and self.ranks.first and point is not None and point.is_in(self.record.folder):
            for path in point.set_later_aside():
                self.observer.on_event(CheckpointSetAside(path=str(path), step=point.step))
        self.observer.on_step(metrics)
        self._watch.look()

    def _write_to(self, folder: Path) -> None:
        """Write to a different folder from now on, and stop: the run's lock does not apply there."""
        self.record.folder, self.checkpoints.root = folder, folder / CHECKPOINTS
        self.stop.request("the loss of its folder")

    def _extends(self) -> bool:
        """Return True for a finished run with evaluations and more steps: its last checkpoint, which may stay the best, precedes its last evaluation."""
        if self.point is None or not self.progress.eval_metrics:
            return False
        planned = self.point.manifest.schedule.get("num_steps")
        return planned is not None and planned <= self.point.step

    def _save_last(self) -> None:
        """Save the last step unless a checkpoint has it; report a failure without aborting the run."""
        with contextlib.suppress(SaveFailed):  # already reported as an event
            self.training.save(wait=True)
        self.deferred.forget_failed_save()

    def _newest(self) -> str | None:
        newest = self.checkpoints.newest
        if newest is None and self.point is not None:
            newest = self.point.checkpoint.folder
        return str(newest) if newest is not None else None

    def _manifest(self, step: int) -> Manifest:
        """Return the manifest of a checkpoint, without arrays and files."""
        plan, config, described = self.plan, self.plan.config, self.described
        num_steps, extension = self.recipe.num_steps(), self.prepared.extension
        following = rate_of_step(step, config, num_steps=num_steps, extension=extension)
        extended = {"extended": extension.to_json()} if extension is not None else {}
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
                "next_lr": following if step < num_steps else None,
                **extended,
            },
            data=dict(self.recipe.position(step)),
            progress=self.progress.to_manifest() | {"wall_s": time.perf_counter() - self._started},
            asked=described["asked"],
            options=described["options"],
            versions=described["machine"].get("versions", {}),
            resumed_from=described["resumed_from"],
            facts={"loss_scale": self.scale.to_json()},
        )

    def _write_result(self, session: Session) -> None:
        """Write the best or the last weights as the result, and record which."""
        self.group.barrier()  # rank 0 has finished writing checkpoints
        runs = [Path(self.group.broadcast(str(self.record.folder)))]
        if self.point is not None:
            runs.append(self.point.run)
        chosen, best = best_weights(self.plan.config, self.progress, runs, self.observer, group=self.group)
        for name, step in (("best", best), ("last", self.progress.steps)):
            metrics = self.progress.eval_metrics.get(step) if step is not None else None
            self.extra[name] = {"step": step, "metrics": metrics} if metrics is not None else None
        if chosen is not None:
            if self.progress.steps > self.checkpoints.last_step and self._has_finite_weights(session):
                self._save_last()  # before the best weights replace them: the run may be continued
            session.import_weights(result_weights(chosen.load()))
        elif not self._has_finite_weights(session):
            return
        step = chosen.step if chosen is not None else self.progress.steps
        result = self._save_result(session)
        if result is not None:
            self.extra |= {"result": str(result), "result_step": step}
            costs = read_record(result).get("against_trained") or None
            self.observer.on_event(ResultSaved(path=str(result), step=step, against_trained=costs))
        self.deferred.check()

    def _has_finite_weights(self, session: Session) -> bool:
        """Return True if all weights are finite. Only a failed run is checked, and not after losing a rank: exporting
        the weights may need every rank."""
        if isinstance(self.failure, PeerLost) or not self.group.any(self.failure is not None):
            return True
        bad = find_bad_weight(session)
        if bad is not None:
            message = f"no result is written: {bad} has non-finite values"
            self.observer.on_event(Warned(message=message, step=self.progress.steps))
        return not self.group.any(bad is not None)

    def _save_result(self, session: Session) -> Path | None:
        """Write the result; if that fails, save the weights in a checkpoint."""
        self.group.activity.start("saving the result")
        try:
            return save_result(session, self.recipe, self.record.folder, writes=self.ranks.first)
        except SaveFailed as error:
            if self.ranks.size == 1:
                self._save_last()
            if (newest := self._newest()) is None:
                raise
            raise SaveFailed(
                error.message, why=error.why, do=f"{error.do}; the newest checkpoint is {newest}"
            ) from error
