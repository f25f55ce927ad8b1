"""A model as a checkpoint has it: opened from its base and the stored weights, and written out for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.checkpoint.folders import FOLDER
from crosstune.checkpoint.read import Checkpoint, newest_valid, open_checkpoint
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.schema import Config, options_on_resume
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.protocols import Session
from crosstune.core.record import holds_run
from crosstune.models.locate import ModelFolder
from crosstune.models.staged import check_out, staged
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_base, open_recipe, open_session, weights_identity
from crosstune.runs.resume import kept_options, passed_over

_SPARE_BYTES = 50_000_000


def pick_checkpoint(path: Path, observer: Observer) -> Checkpoint:
    """A checkpoint, or the newest valid one of a run; a damaged one that is passed over is named."""
    root = path / FOLDER
    if not root.is_dir() and not holds_run(path):
        return open_checkpoint(path.resolve())
    if not root.is_dir():
        learned = f" --base_adapter {path / 'adapter'}" if (path / "adapter").is_dir() else ""
        raise UserError(
            f"{path} has no checkpoint.",
            why="it ran without --save_steps and --save_minutes, and was not stopped.",
            do=f"start a new run with --save_steps N{learned}",
        )
    found = newest_valid(root, on_damaged=lambda error: observer.on_event(passed_over(error)))
    if found is None:
        raise UserError(
            f"{path} has no checkpoint that is whole.", do=f"see: crosstune checkpoint verify {path}"
        )
    return found


def restored_config(
    checkpoint: Checkpoint, *, backend: str, precision: str = "auto", model_name: str | None = None
) -> Config:
    """The options of the training a checkpoint is from, for a backend of this machine; `model_name` says where its
    base is now."""
    asked, known = checkpoint.manifest.get("asked") or {}, make_config().options()
    left = options_on_resume(OnResume.OWN_MACHINE, OnResume.ONE_START)
    kept = {name: value for name, value in asked.items() if name in known and name not in left}
    was = kept_options(checkpoint, asked, backend=backend)
    used = was.pop("precision", asked.get("precision", "auto"))
    kept |= was
    if precision == "auto":
        precision = used
    if model_name is not None:
        kept["model_name"] = model_name
    return make_config(**kept, backend=backend, precision=precision)


def check_model(checkpoint: Checkpoint, model: ModelFolder | None) -> None:
    """Raise where the base is another one than the checkpoint was trained from."""
    if model is None:  # the recipe brings its own
        return
    recorded = checkpoint.manifest["identity"].get("model", {})
    if recorded.get("identity") not in (None, weights_identity(model.path)):
        raise UserError(
            f"{model.name} is not the model that {checkpoint.folder} was trained from.",
            why=f"its weights are others than those of {recorded.get('name')}, which the checkpoint names.",
            do="put the original model back in its place, or name where it is with --model_name",
        )


def open_restored(
    checkpoint: Checkpoint, *, observer: Observer, backend: str = "auto", model_name: str | None = None
) -> Session:
    """Open the model of a checkpoint on a backend of this machine."""
    plan = make_plan(restored_config(checkpoint, backend=backend, model_name=model_name))
    model = find_base(plan.config, checkpoint, observer)
    check_model(checkpoint, model)
    # A causal language model is opened without its data; the model of another recipe may depend on it.
    task = None if model is not None else open_recipe(plan.config, model, observer).task(plan.engine)
    session = open_session(plan, model, task=task)
    session.import_weights(checkpoint.load().weights)
    return session


def export_checkpoint(
    checkpoint: Checkpoint,
    out: Path,
    *,
    observer: Observer,
    backend: str = "auto",
    model_name: str | None = None,
) -> dict[str, Any]:
    """Write what a checkpoint has learned as PEFT or transformers load it."""
    check_out(out)
    session = open_restored(checkpoint, observer=observer, backend=backend, model_name=model_name)
    trained, everything = session.num_parameters()
    whole = checkpoint.manifest.get("method") not in ("lora", "dora")
    need = 4 * (everything if whole else trained) + _SPARE_BYTES
    with staged(out, need_bytes=need) as stage:
        written = session.save_result(stage.scratch)
        assert written is not None
        written.rename(stage.result)
    return {"path": str(out), "step": checkpoint.step, "checkpoint": str(checkpoint.folder)}
