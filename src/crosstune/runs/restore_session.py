"""Restore the session of a resumed run from its checkpoint, and compare the loss of a run that moved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from crosstune.checkpoint.eight_bit import holds_eight_bit, plain_moments
from crosstune.config.options.run import mismatches
from crosstune.config.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.events import Moved, Observer, Resumed, Warned
from crosstune.core.protocols import Array, Recipe, Session, SessionState
from crosstune.core.scaling import LossScale
from crosstune.loop import move_check
from crosstune.runs.resume import ResumePoint
from crosstune.runs.same_training import quantization_name


def restore_session(
    session: Session, point: ResumePoint, *, plan: Plan, recipe: Recipe, scale: LossScale, observer: Observer
) -> None:
    """Import the state of the checkpoint into a new session and the loss scale."""
    allowed = set(mismatches(plan.config.allow_mismatch))
    state = _fitting_state(
        point.checkpoint.load(),
        current=session.export_state(copy=False).weights if "trainable" in allowed else None,
        optimizer=plan.config.optimizer,
        moments=not any(difference.kind == "optimizer" for difference in point.differences),
    )
    session.import_state(state)
    scale.load(state.facts.get("loss_scale") or scale.to_json())
    if "trainable" in allowed:
        observer.on_event(Warned(message=_num_restored(point, state)))
    observer.on_event(Resumed(**point.facts(), engine=point.manifest.engine))
    before = point.manifest.backend
    if point.measured is not None:
        here = move_check.measure(
            session,
            recipe,
            step=point.step,
            like=point.measured,
            backend=plan.backend.name,
            precision=plan.precision,
            quantization=quantization_name(plan),
        )
        compared = move_check.compare(point.measured, here)
        observer.on_event(Moved(comparison=compared))
        move_check.check(compared, allowed="loss" in allowed)
    elif before != plan.backend.name:
        message = f"the effect of the move from {before} was not measured; `crosstune move` measures it"
        observer.on_event(Warned(message=message))


def _num_restored(point: ResumePoint, state: SessionState) -> str:
    stored = point.manifest.trainable
    fits = [n for n, a in state.weights.items() if stored.get(n, {}).get("shape") == list(a.shape)]
    return f"{len(fits)} of {len(state.weights)} trained arrays come from the checkpoint; the others are new"


def _fitting_state(
    state: SessionState, *, current: Mapping[str, Array] | None, optimizer: str, moments: bool
) -> SessionState:
    """Return the state for a session: all of the stored one or, given the session's `current` weights, the stored arrays
    that match them in name and shape, and the current ones otherwise.

    8-bit moments are dequantized for an optimizer with fp32 moments.
    """
    kept: Mapping[str, Mapping[str, Array]] = state.moments if moments else {}
    if holds_eight_bit(kept) and not optimizer.endswith("_8bit"):
        kept = plain_moments(kept, state.weights)
    if current is None:
        return replace(state, moments=kept)
    fits = {n for n, a in state.weights.items() if n in current and current[n].shape == a.shape}
    if not fits:
        raise UserError(
            "Nothing that the checkpoint has learned fits this run.",
            why="none of its arrays has the name and shape of a trained array.",
            do="continue with its own method, rank and targets, or start a new run",
        )
    weights = {name: state.weights[name] if name in fits else array for name, array in current.items()}
    kept = {slot: {n: a for n, a in arrays.items() if n in fits} for slot, arrays in kept.items()}
    return replace(state, weights=weights, moments=kept)
