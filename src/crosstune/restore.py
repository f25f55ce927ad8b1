"""A model as a checkpoint has it: opened from its base and the stored weights, and written out for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import FOLDER
from crosstune.checkpoint.read import Checkpoint, newest_valid, open_checkpoint
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.protocols import Observer, Session
from crosstune.models.locate import identity
from crosstune.models.staged import check_out, staged
from crosstune.run import find_model, make_plan, open_session

# Options of a training that only its own machine could keep.
_NOT_RESTORED = frozenset({"backend", "precision", "resume", "overwrite", "allow_mismatch", "time_limit"})
_SPARE_BYTES = 50_000_000


def pick_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint, or the newest valid one of a run."""
    root = path / FOLDER
    if not root.is_dir():
        return open_checkpoint(path.resolve())
    found = newest_valid(root)
    if found is None:
        raise UserError(
            f"{path} has no checkpoint that is whole.", do=f"see: crosstune checkpoint verify {path}"
        )
    return found


def open_restored(
    checkpoint: Checkpoint, *, observer: Observer, backend: str = "auto", precision: str | None = None
) -> Session:
    """The model of a checkpoint on a backend of this machine, in the precision it was trained in or another."""
    asked = {k: v for k, v in (checkpoint.manifest.get("asked") or {}).items() if k not in _NOT_RESTORED}
    known = {name: value for name, value in asked.items() if name in make_config().options()}
    wanted = precision or checkpoint.manifest["precision"]
    plan = make_plan(make_config(**known, backend=backend, precision=wanted))
    model = find_model(plan.config, observer)
    recorded = checkpoint.manifest["identity"].get("model", {}).get("identity")
    if recorded != identity(model.path)["weights_sha256"]:
        raise UserError(
            f"{plan.config.model_name} is not the model that {checkpoint.folder} was trained from.",
            why="its weights are others than those the checkpoint names.",
            do="put the original model back in its place",
        )
    session = open_session(plan, model)
    session.import_weights(checkpoint.load().weights)
    return session


def export_checkpoint(
    checkpoint: Checkpoint, out: Path, *, observer: Observer, backend: str = "auto"
) -> dict[str, Any]:
    """Write what a checkpoint has learned as PEFT or transformers load it."""
    check_out(out)
    session = open_restored(checkpoint, observer=observer, backend=backend)
    trained, everything = session.num_parameters()
    whole = checkpoint.manifest.get("method") not in ("lora", "dora")
    need = 4 * (everything if whole else trained) + _SPARE_BYTES
    with staged(out, need_bytes=need) as stage:
        session.save_result(stage.scratch).rename(stage.result)
    return {"path": str(out), "step": checkpoint.step, "checkpoint": str(checkpoint.folder)}
