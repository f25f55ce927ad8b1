"""Restore the session of a resumed run from its checkpoint, and compare the loss of a run that moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crosstune.checkpoint.read import Checkpoint
from crosstune.config.options.run import mismatches
from crosstune.config.plan import Plan
from crosstune.core.events import Moved, Observer, Resumed, Warned
from crosstune.core.measured import LossMeasurement
from crosstune.core.protocols import Recipe, Session, SessionState
from crosstune.core.scaling import LossScale
from crosstune.loop import move_check
from crosstune.runs import resume, same_training


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint a resumed run starts from, and how the run differs from it."""

    checkpoint: Checkpoint
    differences: Sequence[same_training.Difference]
    """Allowed by --allow_mismatch."""
    adapted: Sequence[same_training.Difference]
    """Expected on another backend."""
    changes: Sequence[same_training.Difference]
    measured: LossMeasurement | None
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


def restore_session(
    session: Session, start: Start, *, plan: Plan, recipe: Recipe, scale: LossScale, observer: Observer
) -> None:
    """Import the state of the checkpoint into a new session and the loss scale."""
    allowed = set(mismatches(plan.config.allow_mismatch))
    state = resume.fitting_state(
        start.checkpoint.load(),
        current=session.export_state(copy=False).weights if "trainable" in allowed else None,
        optimizer=plan.config.optimizer,
        moments=not any(difference.kind == "optimizer" for difference in start.differences),
    )
    session.import_state(state)
    scale.load(state.facts.get("loss_scale") or scale.to_json())
    if "trainable" in allowed:
        observer.on_event(Warned(message=_num_restored(start, state)))
    manifest = start.checkpoint.manifest
    observer.on_event(Resumed(**start.facts(), engine=manifest["engine"]))
    if start.measured is not None:
        _compare_machines(
            session,
            start,
            start.measured,
            plan=plan,
            recipe=recipe,
            observer=observer,
            allowed="loss" in allowed,
        )
    elif manifest["backend"] != plan.backend.name:
        message = (
            f"the effect of the move from {manifest['backend']} was not measured; "
            "`crosstune move` measures it"
        )
        observer.on_event(Warned(message=message))


def _num_restored(start: Start, state: SessionState) -> str:
    stored = start.checkpoint.manifest["trainable"]
    fits = [n for n, a in state.weights.items() if stored.get(n, {}).get("shape") == list(a.shape)]
    return f"{len(fits)} of {len(state.weights)} trained arrays come from the checkpoint; the others are new"


def _compare_machines(
    session: Session,
    start: Start,
    measured: LossMeasurement,
    *,
    plan: Plan,
    recipe: Recipe,
    observer: Observer,
    allowed: bool,
) -> None:
    """Compare the loss of the same batches on both machines before a moved run continues."""
    here = move_check.measure(
        session,
        recipe,
        step=start.step,
        like=measured,
        backend=plan.backend.name,
        precision=plan.precision,
        quantization=same_training.quantization_name(plan),
    )
    compared = move_check.compare(measured, here)
    observer.on_event(Moved(comparison=compared))
    move_check.check(compared, allowed=allowed)
