"""A run from the loading of its model to its result. Whatever ends it, what was done until then stays on record."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from crosstune.checkpoint.folders import FOLDER as CHECKPOINTS
from crosstune.checkpoint.folders import clear_leftovers
from crosstune.checkpoint.read import Checkpoint
from crosstune.checkpoint.rotate import Keep
from crosstune.checkpoint.write import SaveFailed
from crosstune.config.options.run import mismatches
from crosstune.config.plan import Plan
from crosstune.core import atomic_files
from crosstune.core.errors import NonFiniteError, OutOfMemory, PeerLost, UserError
from crosstune.core.events import (
    CheckpointSetAside,
    Failed,
    Interrupted,
    Loaded,
    Loading,
    Moved,
    Observer,
    ResultSaved,
    Resumed,
    Stopped,
    Warned,
)
from crosstune.core.json_files import read_json
from crosstune.core.measured import Measured
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

_RESULT = "result"


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run that continues takes up."""

    checkpoint: Checkpoint
    differences: Sequence[same_training.Difference]
    """Allowed by --allow_mismatch."""
    adapted: Sequence[same_training.Difference]
    """What another backend does in its own way."""
    changes: Sequence[same_training.Difference]
    measured: Measured | None
    """The loss of the batches that come next, on the machine the checkpoint is from."""

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
    """Load, train, save. Whatever ends it, what was done until then stays on record.

    Of several processes all do this, and the first one writes.
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
    failure: UserError | None = None
    """What ended the run early, with everything up to the step before it kept."""
    checkpoints: Checkpoints | None = None

    def __post_init__(self) -> None:
        self.ranks = self.group.ranks
        self.scale = LossScale(enabled=needs_loss_scale(self.plan.precision))

    def run(self) -> dict[str, Any]:
        """Returns the summary."""
        plan, record = self.plan, self.record
        carried = self.start.checkpoint.manifest["progress"] if self.start else {}
        self.progress = Progress.from_manifest(carried, weight_name=self.recipe.weight_name)
        stop = StopSignal(shared=self.ranks.size > 1)
        extra: dict[str, Any] = {"name": record.folder.name, "backend": plan.backend.name}
        extra |= {"engine": plan.engine, "checkpoint": None, "result": None}
        with stop.listening():
            self._execute(stop, extra)
        return self.progress.summary() | extra

    def _execute(self, stop: StopSignal, extra: dict[str, Any]) -> None:
        """The run, and its end on record. `extra` takes up what the summary says beside the progress."""
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
                self._take_up(session, self.start)
            self.failure = self._train(session, stop)
            if self.failure is not None:
                extra["error"] = str(self.failure)
                observer.on_event(Failed(error=str(self.failure), step=self.progress.steps))
            extra["checkpoint"] = self._newest()
            wanted = plan.config.save_model and self.progress.steps
            if wanted and self._is_good(session) and (result := self._save_result(session)):
                extra["result"] = str(result)
                costs = _cost_of_saving(result)
                observer.on_event(
                    ResultSaved(path=extra["result"], step=self.progress.steps, against_trained=costs)
                )
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
            with contextlib.suppress(RecordFailed):  # which may be what ended it
                ending = Interrupted if stopped else Failed
                record.on_event(ending(error=extra["error"], step=self.progress.steps))
            raise
        finally:
            extra["seconds"] = self.progress.wall_s = time.perf_counter() - self._started
            record.finish(self.progress.summary() | extra)

    def _load(self, stop: StopSignal) -> Session:
        self.observer.on_event(Loading(model=self.described["model"]["name"]))
        with stop.droppable():
            return self.open_model()

    def _train(self, session: Session, stop: StopSignal) -> UserError | None:
        """What ended the training early, if something did that leaves its weights good."""
        assert self.checkpoints is not None
        training = Training(
            session=session,
            recipe=self.recipe,
            config=self.plan.config,
            observer=self.observer,
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
        except (NonFiniteError, OutOfMemory, PeerLost, SaveFailed) as error:
            return error
        return None

    def _take_up(self, session: Session, start: Start) -> None:
        """Give a fresh session the state of the checkpoint."""
        config, allowed = self.plan.config, set(mismatches(self.plan.config.allow_mismatch))
        state = resume.fitting_state(
            start.checkpoint.load(),
            own=session.export_state(copy=False).weights if "trainable" in allowed else None,
            optimizer=config.optimizer,
            moments=not any(difference.kind == "optimizer" for difference in start.differences),
        )
        session.import_state(state)
        self.scale.load(state.facts.get("loss_scale") or self.scale.to_json())
        if "trainable" in allowed:
            self._say_what_fits(start, state)
        manifest = start.checkpoint.manifest
        self.observer.on_event(Resumed(**start.facts(), engine=manifest["engine"]))
        if manifest["backend"] != self.plan.backend.name or start.measured is not None:
            self._compare_machines(session, start, allowed="loss" in allowed)

    def _say_what_fits(self, start: Start, state: SessionState) -> None:
        stored = start.checkpoint.manifest["trainable"]
        fits = [n for n, a in state.weights.items() if stored.get(n, {}).get("shape") == list(a.shape)]
        message = f"{len(fits)} of {len(state.weights)} trained arrays come from the checkpoint; the others start anew"
        self.observer.on_event(Warned(message=message))

    def _compare_machines(self, session: Session, start: Start, *, allowed: bool) -> None:
        """Before a run goes on elsewhere: the same batches, there and here."""
        if start.measured is None:
            message = (
                f"what the move from {start.checkpoint.manifest['backend']} changes was not measured; "
                "`crosstune move` does that"
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
            self._tidy(root)
        checkpoints = Checkpoints(
            root,
            policy=SavePolicy(
                every_steps=config.save_steps,
                every_s=60 * config.save_minutes,
                at_end=config.save_steps > 0 or config.resume != "none" or self._is_small(),
                keep=Keep(last_n=config.keep_last_n, best=config.keep_best, every=config.keep_every),
                stop_on_error=config.on_save_error == "stop",
            ),
            fields=self._fields,
            observer=self.observer,
            writes=self.ranks.first,
        )
        checkpoints.last_step = self.start.step if self.start else 0
        return checkpoints

    def _is_small(self) -> bool:
        """The state of adapters is always worth keeping; that of a whole model is three times its size."""
        return self.plan.method in ("lora", "dora") and self.plan.config.save_minutes > 0

    def _tidy(self, root: Path) -> None:
        clear_leftovers(root)
        atomic_files.clear_leftovers(self.record.folder, of=_RESULT.__eq__)
        if self.start is not None and resume.continues_in_place(self.record.folder, self.start.checkpoint):
            for path in resume.settle_folder(self.record.folder, self.start.checkpoint):
                self.observer.on_event(CheckpointSetAside(path=str(path), step=self.start.step))

    def _newest(self) -> str | None:
        newest = self.checkpoints.newest if self.checkpoints is not None else None
        if newest is None and self.start is not None:
            newest = self.start.checkpoint.folder
        return str(newest) if newest is not None else None

    def _fields(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint, but for what is in its files."""
        plan, config = self.plan, self.plan.config
        left = step < self.recipe.num_steps()
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
                "next_lr": self._rate(step) if left else None,
            },
            "data": dict(self.recipe.position(step)),
            "progress": self.progress.to_manifest() | {"wall_s": time.perf_counter() - self._started},
            "asked": self.described["asked"],
            "options": self.described["options"],
            "versions": self.described["machine"].get("versions", {}),
            "resumed_from": self.described["resumed_from"],
        }

    def _is_good(self, session: Session) -> bool:
        """Weights that are not finite are no result; only a run that failed can have them. Exporting them may need every
        process, so a run that lost one takes the weights of its last whole step as they are."""
        if self.failure is None or isinstance(self.failure, PeerLost):
            return True
        weights = session.export_state(copy=False).weights
        bad = next((name for name, array in weights.items() if not np.isfinite(array).all()), None)
        if bad is not None:
            message = f"no result is written: {bad} holds numbers that are not finite"
            self.observer.on_event(Warned(message=message, step=self.progress.steps))
        return bad is None

    def _save_result(self, session: Session) -> Path | None:
        """Write the result beside its place and put it there, so that an older one is replaced in one step.

        Every process takes part, as gathering the weights may need all of them; the first one writes.
        """
        folder = self.record.folder
        if not self.ranks.first:
            session.save_result(None)
            return None
        try:
            with atomic_files.staging_folder(folder / _RESULT) as staging:
                written = session.save_result(staging)
                assert written is not None
                self.recipe.complete_result(written)
                target = folder / written.name
                atomic_files.put_in_place(written, target, aside=staging / "old")
        except (OSError, SafetensorError) as error:
            said = error.strerror if isinstance(error, OSError) else None
            raise SaveFailed(
                f"The result could not be written to {folder}.",
                why=f"the system said: {said or error}.",
                do=_export_words(self._newest()),
            ) from error
        return target


def _cost_of_saving(result: Path) -> dict[str, Any] | None:
    """Return the distance of what was saved from what was trained, where the two differ."""
    record = result / "crosstune.json"
    costs = read_json(record).get("against_trained") if record.is_file() else None
    return costs or None


def _export_words(newest: str | None) -> str:
    if newest is None:
        return "free space or mend the disk, and run it again"
    return (
        f"free space or mend the disk; the newest checkpoint is {newest}, and --resume auto continues from it"
    )
