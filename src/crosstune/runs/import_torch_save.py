"""Import a checkpoint written by `torch.save`: weights and Adam moments under canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from crosstune.checkpoint.folders import name_of
from crosstune.checkpoint.manifest import Manifest
from crosstune.checkpoint.tensors import describe_trainable
from crosstune.checkpoint.write import write_checkpoint
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.protocols import Array, SessionState
from crosstune.models.identity import source_identity
from crosstune.models.locate import ModelFolder
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.resume_identity import quantization_name, settings_of

if TYPE_CHECKING:
    from crosstune.torch_engine.results.import_torch_save import Foreign

_STEP_KEYS = ("global_step", "step", "steps")


def import_checkpoint(
    path: Path,
    config: Config,
    root: Path,
    *,
    observer: Observer,
    step: int | None = None,
    without_optimizer: bool = False,
) -> dict[str, Any]:
    """Write `root/step-N` from a file written by `torch.save`; `config` has its model and method."""
    from crosstune.torch_engine.results.import_torch_save import read_foreign

    found = read_foreign(path)
    plan = make_plan(config)
    model = find_model(plan.config, observer)
    expected = open_session(plan, model).export_state(copy=False)
    weights = _match(found.weights, expected.weights, path)
    moments = {} if without_optimizer else _match_moments(found, weights, path)
    step = step if step is not None else _step(found.facts)
    state = SessionState(weights=weights, moments=moments, random={})
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"Cannot write to {root.parent}.", why=str(error), do="choose a different --out"
        ) from error
    if (root / name_of(step)).exists():
        raise UserError(f"{root / name_of(step)} already exists.", do="choose a different --out or --step")
    committed = write_checkpoint(root, state, _manifest(plan, model, state, found, step))
    return {
        "path": str(committed.folder),
        "step": step,
        "weights": len(weights),
        "moments": sorted(moments),
        "left_out": len(found.weights) - len(weights),
    }


def _match(found: Mapping[str, Array], expected: Mapping[str, Array], path: Path) -> dict[str, Array]:
    """Return the trained weights of the plan in the order of the file."""
    wrong = [n for n, array in expected.items() if n not in found or found[n].shape != array.shape]
    if wrong:
        raise UserError(
            f"{path} does not match the weights that this model and method train.",
            why=f"{len(wrong)} weights are missing or have a different shape, the first is {wrong[0]}.",
            do="pass the --model_name, --train_type, --lora_rank and --lora_target_modules it was made with",
        )
    return {name: array for name, array in found.items() if name in expected}


def _match_moments(found: Foreign, weights: Mapping[str, Array], path: Path) -> dict[str, dict[str, Array]]:
    """Return moments by slot and weight name. Optimizers number parameters in the order of the weights."""
    if not found.moments:
        return {}
    same = len(found.order) == len(weights)
    wrong = "" if same else f"it has {len(found.order)} parameters for {len(weights)} weights"
    slots: dict[str, dict[str, Array]] = {}
    for (name, weight), number in zip(weights.items(), found.order, strict=same):
        for slot, array in found.moments.get(number, {}).items():
            if slot != "step" and array.shape != weight.shape:
                wrong = f"{slot} of {name} has the shape {array.shape}"
            slots.setdefault(slot, {})[name] = array.astype(np.float32)
    if wrong:
        raise UserError(
            f"The optimizer state in {path} does not match its weights.",
            why=f"{wrong}.",
            do="pass --without_optimizer to import the weights alone",
        )
    return slots


def _step(facts: Mapping[str, Any]) -> int:
    found = next((facts[key] for key in _STEP_KEYS if isinstance(facts.get(key), int)), None)
    if found is None:
        raise UserError("The file does not record its step.", do="pass --step N")
    return int(found)


def _manifest(plan: Plan, model: ModelFolder, state: SessionState, found: Foreign, step: int) -> Manifest:
    """Return the manifest without data and order, which are unknown and so not compared on resume."""
    known = {key: found.facts[key] for key in ("backend", "precision", "quantization") if key in found.facts}
    base = {"name": plan.config.model_name, "identity": source_identity(model.path)["weights"]}
    return Manifest(
        step=step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        engine="torch",
        backend=str(known.get("backend", plan.backend.name)),
        precision=str(known.get("precision", plan.precision)),
        quantization=known.get("quantization", quantization_name(plan)),
        method=plan.method,
        recipe=plan.config.recipe,
        identity={"model": base, "trainable": settings_of(plan), "optimizer": "adamw"},
        schedule={"step": step},
        data={},
        progress={"steps": step},
        asked=plan.config.options_asked(),
        options=plan.config.options(),
        trainable=describe_trainable(state),
        extra={"imported": dict(found.facts)},
    )
