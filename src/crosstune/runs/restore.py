"""Open the model of a checkpoint from its base and the stored weights, and export it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.checkpoint.read import Checkpoint
from crosstune.config.load import make_config
from crosstune.config.option import OnResume
from crosstune.config.schema import Config, options_on_resume
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.core.protocols import Session
from crosstune.core.weight_average import result_weights
from crosstune.models.adapter_files import replace_tokenizer
from crosstune.models.identity import source_identity
from crosstune.models.locate import ModelFolder
from crosstune.models.staged import check_out, staged
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_base, open_recipe, open_session
from crosstune.runs.resume import kept_options

_SPARE_BYTES = 50_000_000


def restored_config(
    checkpoint: Checkpoint, *, backend: str, precision: str = "auto", model_name: str | None = None
) -> Config:
    """Return the options of a checkpoint's training for a backend of this machine; `model_name` overrides the path of
    its base."""
    asked, known = checkpoint.manifest.asked, make_config().options()
    dropped = options_on_resume(OnResume.OWN_MACHINE, OnResume.ONE_START)
    kept = {name: value for name, value in asked.items() if name in known and name not in dropped}
    earlier = kept_options(checkpoint, asked, backend=backend)
    earlier_precision = earlier.pop("precision", asked.get("precision", "auto"))
    kept |= {name: value for name, value in earlier.items() if name not in dropped}
    if precision == "auto":
        precision = earlier_precision
    if model_name is not None:
        kept["model_name"] = model_name
    return make_config(**kept, backend=backend, precision=precision)


def check_model(checkpoint: Checkpoint, model: ModelFolder | None) -> None:
    """Raise if the base is not the one the checkpoint was trained from."""
    if model is None:  # the recipe brings its own
        return
    recorded, found = checkpoint.manifest.identity.get("model", {}), source_identity(model.path)
    other = [
        what
        for key, what in (("identity", "weights"), ("config", "config.json"))
        if recorded.get(key) not in (None, found["weights" if key == "identity" else key])
    ]
    if other:
        raise UserError(
            f"{model.name} is not the model that {checkpoint.folder} was trained from.",
            why=f"its {other[0]} differ{'s' * (other[0] != 'weights')} from {recorded.get('name')}, which the checkpoint names.",
            do="put the original model back, or give its path with --model_name",
        )


def open_restored(
    checkpoint: Checkpoint, *, observer: Observer, backend: str = "auto", model_name: str | None = None
) -> Session:
    """Open the model of a checkpoint on a backend of this machine."""
    config = restored_config(checkpoint, backend=backend, model_name=model_name)
    plan = make_plan(config, base=checkpoint.manifest.base_choice)
    model = find_base(plan.config, checkpoint, observer)
    check_model(checkpoint, model)
    # A causal language model opens without its data; the model of another recipe may depend on it.
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
    """Write the trained weights of a checkpoint in the format of PEFT or transformers."""
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
