"""Open the parts of a run: the model folder, the recipe, the session."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from crosstune.checkpoint.read import Checkpoint
from crosstune.config.load import add_environment, cache_override
from crosstune.config.recipe_spec import load_recipe
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.core.events import ModelProgress, Observer
from crosstune.core.protocols import Session, Task
from crosstune.models.added_tokens import add_tokens
from crosstune.models.identity import identity
from crosstune.models.locate import ModelFolder, locate
from crosstune.models.rope_scaling import scale_rope
from crosstune.process.ranks import Group


def show_progress(observer: Observer, model: str) -> Callable[[str, int, int | None], None]:
    """Return a callback that reports a stage, its finished bytes and its total to the observer."""

    def show(stage: str, done: int, total: int | None) -> None:
        observer.on_event(ModelProgress(stage=stage, done=done, total=total, model=model))

    return show


def find_model(config: Config, observer: Observer) -> ModelFolder:
    """Find or fetch the model of --model_name."""
    show = show_progress(observer, config.model_name)
    model = locate(config.model_name, cache=cache_override(), progress=show)
    if config.add_tokens:
        model = add_tokens(model, config.add_tokens, cache=cache_override(), progress=show)
    model = with_rope(config, model)
    identity(model.path, progress=show)  # hashed here with progress; later calls use the stored hashes
    return model


def with_rope(config: Config, model: ModelFolder) -> ModelFolder:
    """Return the model with the positions of --rope_scaling, if it is set."""
    if config.rope_scaling == "none" or config.rope_factor is None:
        return model
    return scale_rope(model, config.rope_scaling, config.rope_factor, cache=cache_override())


def find_base(config: Config, checkpoint: Checkpoint | None, observer: Observer) -> ModelFolder | None:
    """Find the base model of a run; None for a recipe with its own model."""
    if not load_recipe(config.recipe).needs_base_model:
        return None
    try:
        return find_model(config, observer)
    except UserError as error:
        if checkpoint is None:
            raise
        base = checkpoint.manifest.identity.get("model", {})
        raise UserError(
            f"The base model of the run, {config.model_name}, was not found.",
            why=error.why or error.message,
            do=f"give its path with --model_name; its weights have the hash {str(base.get('identity'))[:12]}",
        ) from error


def open_session(
    plan: Plan,
    model: ModelFolder | None,
    *,
    task: Task | None = None,
    trained: bool = True,
    group: Group | None = None,
) -> Session:
    """Open a session on the plan's engine with the model of `task`, by default a causal language model. With `trained=False` it
    can only evaluate and generate."""
    add_environment(backend_specs()[plan.backend.name])
    engine = importlib.import_module(f"crosstune.{plan.engine}_engine.open")
    session: Session = engine.open_session(
        plan,
        model_folder=model.path if model is not None else None,
        base_name=(model.name if model.source == "hub" else model.base) if model is not None else None,
        task=task,
        trained=trained,
        group=group,
    )
    return session
