"""Restore a checkpoint: import its state into a resumed run, compare the loss after a move, open its model to export it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crosstune.checkpoint.read import Checkpoint
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.options.run import mismatches
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config, options_on_resume
from crosstune.core.errors import UserError
from crosstune.core.events import Moved, Observer, Resumed, Warned
from crosstune.core.loss_measurement import Comparison, LossMeasurement
from crosstune.core.protocols import CARRIED, Array, Batch, GeneratesBatches, Recipe, Session, SessionState
from crosstune.core.weights import result_weights
from crosstune.loop.step import LossScale
from crosstune.models.adapter_files import replace_tokenizer
from crosstune.models.identity import source_identity
from crosstune.models.locate import ModelFolder
from crosstune.models.staged import check_out, staged
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_base, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.resume import ResumePoint, kept_options
from crosstune.runs.resume_identity import quantization_name

Moments = Mapping[str, Mapping[str, Array]]

_PARTS = {"first_moment": "1", "second_moment": "2"}
_SPARE_BYTES = 50_000_000
NUM_BATCHES = 4
BOUND, BOUND_REQUANTIZED = 0.02, 0.25
"""Maximum relative change of the loss after a change of precision, and after requantizing the base."""


def restore_session(
    session: Session, point: ResumePoint, *, plan: Plan, recipe: Recipe, scale: LossScale, observer: Observer
) -> None:
    """Import a checkpoint into a new session and the loss scale; after a move, compare the loss."""
    allowed = set(mismatches(plan.config.allow_mismatch))
    state = _fitting_state(
        point.checkpoint.load(),
        current=session.export_state(copy=False).weights if "trainable" in allowed else None,
        optimizer=plan.config.optimizer,
        moments=not any(difference.kind == "optimizer" for difference in point.differences),
    )
    session.import_state(state)
    if isinstance(recipe, GeneratesBatches):
        found = {name: array for name, array in state.random.items() if name.startswith(CARRIED)}
        carried = {name.removeprefix(CARRIED): array for name, array in found.items()}
        recipe.carry_on(carried, step=point.step)
    scale.load(state.facts.get("loss_scale") or scale.to_json())
    if "trainable" in allowed:
        stored = point.manifest.trainable
        fits = [n for n, a in state.weights.items() if stored.get(n, {}).get("shape") == list(a.shape)]
        message = (
            f"{len(fits)} of {len(state.weights)} trained arrays are from the checkpoint; the others are new"
        )
        observer.on_event(Warned(message=message))
    observer.on_event(Resumed(**point.facts(), engine=point.manifest.engine))
    before = point.manifest.backend
    if point.measured is not None:
        here = measure_loss(session, recipe, plan, step=point.step, like=point.measured)
        compared = compare_losses(point.measured, here)
        observer.on_event(Moved(comparison=compared))
        check_loss_change(compared, allowed="loss" in allowed)
    elif before != plan.backend.name:
        message = f"the effect of the move from {before} was not measured; `crosstune move` measures it"
        observer.on_event(Warned(message=message))


def _fitting_state(
    state: SessionState, *, current: Mapping[str, Array] | None, optimizer: str, moments: bool
) -> SessionState:
    """Return the stored state, with 8-bit moments dequantized for an optimizer with fp32 moments. If `current` weights are
    given, only stored arrays of the same name and shape replace them."""
    kept: Moments = state.moments if moments else {}
    if "state1" in kept and not optimizer.endswith("_8bit"):
        kept = plain_moments(kept, state.weights)
    if current is None:
        return replace(state, moments=kept)
    fits = {n for n, a in state.weights.items() if n in current and current[n].shape == a.shape}
    if not fits:
        raise UserError(
            "The checkpoint has no weights for this run.",
            why="none of its arrays has the name and shape of a trained array.",
            do="continue with its method, rank and targets, or start a new run",
        )
    weights = {name: state.weights[name] if name in fits else array for name, array in current.items()}
    kept = {slot: {n: a for n, a in arrays.items() if n in fits} for slot, arrays in kept.items()}
    return replace(state, weights=weights, moments=kept)


def plain_moments(moments: Moments, weights: Mapping[str, Array]) -> dict[str, dict[str, Array]]:
    """Dequantize 8-bit moments to fp32: each byte indexes a table of values, scaled by the maximum of its block."""
    parts = {slot: number for slot, number in _PARTS.items() if f"state{number}" in moments}  # lion has one
    plain: dict[str, dict[str, Array]] = {slot: {} for slot in parts}
    if len(parts) == len(_PARTS):
        steps = moments["step"].items()
        plain["step"] = {name: np.asarray(step, dtype=np.float32) for name, step in steps}
    for name, weight in weights.items():
        if name not in moments["state1"]:
            continue
        for slot, number in parts.items():
            codes = moments[f"state{number}"][name]
            if codes.dtype == np.uint8:
                largest = moments[f"absmax{number}"][name]
                block = -(-codes.size // largest.size)
                block = 1 << (block - 1).bit_length()  # a power of two; the last block may be shorter
                scales = np.repeat(largest, block)[: codes.size]
                codes = moments[f"qmap{number}"][name][codes.reshape(-1)] * scales
            plain[slot][name] = codes.astype(np.float32).reshape(weight.shape)
    return plain


def restored_config(checkpoint: Checkpoint, *, backend: str, model_name: str | None = None) -> Config:
    """Return the options of a checkpoint's run for a backend of this machine; `model_name` overrides its base."""
    asked, known = checkpoint.manifest.asked, make_config().options()
    dropped = options_on_resume(OnResume.OWN_MACHINE, OnResume.ONE_START)
    values = {name: value for name, value in asked.items() if name in known}
    values |= kept_options(checkpoint, asked, backend=backend)
    precision = values.get("precision", "auto")
    kept = {name: value for name, value in values.items() if name not in dropped}
    kept |= {"model_name": model_name} if model_name is not None else {}
    return make_config(**kept | {"backend": backend, "precision": precision})


def check_same_model(checkpoint: Checkpoint, model: ModelFolder | None) -> None:
    """Raise if the checkpoint was trained from a different base."""
    if model is None:  # the recipe builds its own
        return
    recorded, found = checkpoint.manifest.identity.get("model", {}), source_identity(model.path)
    for key, what in (("identity", "weights differ"), ("config", "config.json differs")):
        if recorded.get(key) not in (None, found["weights" if key == "identity" else key]):
            raise UserError(
                f"{model.name} is not the model that {checkpoint.folder} was trained from.",
                why=f"its {what} from {recorded.get('name')} in the checkpoint.",
                do="put the original model back, or pass its path with --model_name",
            )


def open_restored(
    checkpoint: Checkpoint, *, observer: Observer, backend: str = "auto", model_name: str | None = None
) -> Session:
    """Open the model of a checkpoint on a backend of this machine."""
    config = restored_config(checkpoint, backend=backend, model_name=model_name)
    plan = make_plan(config, base=checkpoint.manifest.base_choice)
    model = find_base(plan.config, checkpoint, observer)
    check_same_model(checkpoint, model)
    # A causal language model opens without its data; a recipe's own model may depend on it.
    task = None if model is not None else open_recipe(plan.config, model, observer).task(plan.engine)
    session = open_session(plan, model, task=task)
    session.import_weights(result_weights(checkpoint.load()))
    return session


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    observer: Observer,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Write a checkpoint's trained weights in the format of PEFT or transformers."""
    check_out(out)
    session = open_restored(checkpoint, observer=observer, backend=backend, model_name=model_name)
    trained, total = session.num_parameters()
    whole = checkpoint.manifest.method not in ("lora", "dora")
    need = 4 * (total if whole else trained) + _SPARE_BYTES
    with staged(out, need_bytes=need) as stage:
        written = session.save_result(stage.scratch)
        assert written is not None
        tokenizer = checkpoint.manifest.options.get("tokenizer")
        if tokenizer is not None:
            replace_tokenizer(Path(tokenizer).expanduser(), written)
        written.rename(stage.result)
    return {"path": str(out), "step": checkpoint.step, "checkpoint": str(checkpoint.folder)}


def measure_loss(
    session: Session, recipe: Recipe, plan: Plan, *, step: int, like: LossMeasurement | None = None
) -> LossMeasurement:
    """Measure the loss on a few steps: the steps of `like`, otherwise the next steps, or the first steps if the run is at
    its end."""
    last_step = recipe.num_steps()
    windows: list[Sequence[Batch]] = []
    if like is not None:
        first_step = like.first_step
        last = min(first_step + like.num_steps, last_step)
        windows = [recipe.micro_batches(number) for number in range(first_step, last)]
    else:
        first_step = step if step < last_step else 0
        while sum(map(len, windows)) < NUM_BATCHES and first_step + len(windows) < last_step:
            windows.append(recipe.micro_batches(first_step + len(windows)))
    result = session.evaluate([batch for window in windows for batch in window])
    return LossMeasurement(
        step=step,
        first_step=first_step,
        num_steps=len(windows),
        loss=result.loss,
        num_supervised=result.weight,
        backend=plan.backend.name,
        precision=plan.precision,
        quantization=quantization_name(plan),
    )


def compare_losses(there: LossMeasurement, here: LossMeasurement) -> Comparison:
    """Compare the losses before and after a move."""
    bound = BOUND if there.quantization == here.quantization else BOUND_REQUANTIZED
    difference = abs(here.loss - there.loss) / max(abs(there.loss), 1e-12)
    same_rows = there.num_supervised == here.num_supervised
    return Comparison(
        there=there,
        here=here,
        difference=difference,
        bound=bound,
        within=difference <= bound and same_rows,
        same_rows=same_rows,
    )


def check_loss_change(compared: Comparison, *, allowed: bool, flag: str = "--allow_mismatch loss") -> None:
    """Raise if the move changes the loss by more than the bound, unless `allowed`; the error suggests `flag`."""
    if compared.within or allowed:
        return
    there, here = compared.there, compared.here
    if not compared.same_rows:
        raise UserError(
            "The effect of the move cannot be measured.",
            why=f"the same steps have {there.num_supervised:,} supervised tokens on {there.backend} and "
            f"{here.num_supervised:,} on {here.backend}.",
            do=f"continue with the number of steps, data and rows per step of the run, or add {flag}",
        )
    raise UserError(
        "The move changes the model too much.",
        why=f"the same batches have a loss of {there.loss:.6f} on {there.backend} ({there.terms()}) and "
        f"{here.loss:.6f} on {here.backend} ({here.terms()}): {compared.difference:.2%} apart, "
        f"and {compared.bound:.0%} is allowed.",
        do=f"use the same precision and bits on both sides, or add {flag} to continue anyway",
    )
