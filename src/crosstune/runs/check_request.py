"""Check a request before a run starts; shared by `train` and `plan`, so that both refuse the same requests."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from crosstune.checkpoint.read import Checkpoint
from crosstune.config.check_built import unbuilt_parts
from crosstune.config.check_compiler import check_compiler
from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.load import cache_override
from crosstune.config.plan import Plan
from crosstune.config.resolve import resolve
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, raise_all
from crosstune.core.events import Observers
from crosstune.core.machine import Machine
from crosstune.core.names import load_plugin
from crosstune.core.ranks import Ranks
from crosstune.core.record import check_free
from crosstune.core.run_lock import check_place
from crosstune.data.chat_templates import read_template
from crosstune.data.check_rows import is_here
from crosstune.data.columns import TARGETS, parse_columns
from crosstune.data.dataset_list import parse_dataset
from crosstune.data.sources import check_name
from crosstune.data.tokenizer import Tokenizer
from crosstune.loop.profile import check_profile_folder
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_fields import read_settings
from crosstune.models.adapter_files import check_settings
from crosstune.models.checksums import check_checksums
from crosstune.models.identity import identity
from crosstune.models.locate import ModelFolder, fetch_sizes, find_local
from crosstune.planner.gather import gather, needs_base_model
from crosstune.planner.own_model import OwnModel
from crosstune.planner.predict import DataFacts
from crosstune.recipes.sft import open_tokenizer
from crosstune.runs import resume, same_training
from crosstune.runs.folder import run_folder
from crosstune.runs.measure_data import measure_data, measure_own_model
from crosstune.tracking.observe import check_trackers

_READS_MODELS = {"torch": ("torch", "transformers", "accelerate"), "mlx": ("mlx", "mlx_lm")}
"""Engine -> packages needed to build a model from a folder."""


@dataclass
class Checked:
    """Problems found in a request, and what could not be checked here."""

    problems: list[UserError] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Sentences about the model that change nothing, such as which of its weights get no adapter."""
    data: DataFacts | None = None
    """The lengths of the data, if it is small and was tokenized."""
    model: ModelFolder | None = None
    """The model, if it is on this machine and was checked."""
    own_model: OwnModel | None = None
    """What a recipe that brings its own model tells of it, if its data is here."""

    def raise_problems(self) -> None:
        """Raise all problems at once, or a single one directly."""
        if len(self.problems) == 1:
            raise self.problems[0]
        raise_all(self.problems)

    @contextlib.contextmanager
    def collecting(self, option: str = "") -> Iterator[None]:
        """Add an error to the problems, with the option that it is about."""
        try:
            with naming(option) if option else contextlib.nullcontext():
                yield
        except UserError as error:
            if not any(_same(error, other) for other in self.problems):
                self.problems.append(error)


def _same(error: UserError, other: UserError) -> bool:
    """Return whether two errors are about the same, one of them perhaps with the option that it is about."""
    if error.lines() == other.lines():
        return True
    return bool(error.do) and (error.why, error.do) == (other.why, other.do)


def check_request(
    plan: Plan, *, folder: Path | None, checkpoint: Checkpoint | None = None, elsewhere: bool = False
) -> Checked:
    """Check everything that needs no fetching, converting or tokenizing.

    `folder` is the run folder, None in a process that does not write it. `elsewhere` marks a plan for another machine,
    where a path missing here may exist.
    """
    config, checked = plan.config, Checked(problems=unbuilt_parts(plan))
    recipe = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    for option, name in _data_options(config):
        if name is None:
            continue
        with checked.collecting(option):
            for entry in parse_dataset(name):
                if _is_only_elsewhere(entry.name, elsewhere=elsewhere):
                    checked.not_checked.append(f"the data {entry.name}, which is not on this machine")
                elif hasattr(recipe, "check_dataset"):
                    recipe.check_dataset(entry.name)
                else:
                    _check_data_name(entry.name, checked)
    with checked.collecting():
        _check_reading(config, checked, elsewhere=elsewhere)
    with checked.collecting():
        if not elsewhere:
            check_trackers(config)
    with checked.collecting("torch_compile"):
        if not elsewhere:
            check_compiler(plan)
    if elsewhere:
        checked.not_checked.append("whether the run's name is taken there")
    elif folder is not None and not config.overwrite and not _continues(folder, checkpoint):
        with checked.collecting():
            check_free(folder, resuming=resume.wants_checkpoint(config))
    if not elsewhere and folder is not None:
        with checked.collecting():
            check_profile_folder(config, folder)
    if not needs_base_model(config):
        _check_own_model(plan, checked)
        return checked
    with checked.collecting("base_adapter"):
        _check_base_adapter(plan, checked, elsewhere=elsewhere)
    with checked.collecting():
        _check_local_model(plan, checkpoint, checked, elsewhere=elsewhere)
    with checked.collecting("tokenizer"):
        _check_tokenizer(config, checked, elsewhere=elsewhere)
    return checked


def _data_options(config: Config) -> list[tuple[str, str | None]]:
    options = [("dataset", config.dataset), ("eval_dataset", config.eval_dataset)]
    return options + ([("test_dataset", config.test_dataset)] if config.recipe == "judge" else [])


def _check_own_model(plan: Plan, checked: Checked) -> None:
    """Refuse what a recipe that brings its own model has no use for: the options that it names itself, or the methods
    that start from the weights of a base model."""
    config = plan.config
    recipe = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    if hasattr(recipe, "check_options"):
        checked.problems += recipe.check_options(config)
    elif plan.quantizer != "none" or plan.method == "llama_pro":
        checked.problems.append(
            UserError(
                f"--train_type {config.train_type} does not work with the recipe {config.recipe}.",
                why="it starts from the weights of a base model, and the recipe brings a model of its own.",
                do="use --train_type full or lora",
            )
        )
    checked.not_checked.append(f"the model of the recipe {config.recipe} and the layers it has")


def check_plan(
    config: Config, *, machine: Machine | None = None, ranks: Ranks | None = None
) -> tuple[Plan, Checked]:
    """Plan a request and check it as `train` would before its first step, for this machine or for `machine`, in one process
    or in those of `ranks`.

    The data is read; it is tokenized only if it is small and the model is here.
    """
    elsewhere, left = machine is not None, list[str]()
    request = resume.Request(config=config)
    if resume.names_path(config) and _is_packed_or_elsewhere(config, elsewhere=elsewhere):
        left.append(f"the run of --resume {config.resume}, which is packed or not on this machine")
    else:
        request = resume.read_request(config, observer=Observers())
    config, checkpoint = request.config, request.checkpoint
    folder = run_folder(config)
    if checkpoint is not None:
        left.append("whether data and model are those of the checkpoint")
    if needs_base_model(config):
        fetch_sizes(config.model_name, cache=cache_override())
    base = same_training.recorded_base(checkpoint.manifest) if checkpoint is not None else None
    facts = gather(config, machine=machine, ranks=ranks, base=base)
    plan = resolve(config, facts)
    checked = check_request(plan, folder=folder, checkpoint=checkpoint, elsewhere=elsewhere)
    checked.not_checked += left
    if not elsewhere:
        with checked.collecting():
            check_place(folder)  # a training has made its lock there
    if checkpoint is not None:
        with checked.collecting():
            _check_same_training(plan, checkpoint)
    with checked.collecting():
        _check_data(plan.config, checked, elsewhere=elsewhere)
    if checked.model is not None and not checked.problems and needs_base_model(config):
        with checked.collecting("dataset"):
            checked.data = measure_data(plan, checked.model)
    if not checked.problems and _has_own_model_to_measure(plan.config, elsewhere=elsewhere):
        with checked.collecting("dataset"):
            checked.own_model = measure_own_model(plan)
    if checked.data is not None:
        row, target = checked.data.longest_row, checked.data.longest_target
        plan = resolve(config, replace(facts, longest_row=row, longest_target=target))
    return plan, checked


def check_model(plan: Plan, model: ModelFolder, checked: Checked) -> None:
    """Raise if the engine would refuse the model; add its warnings, or why it could not be checked here."""
    missing = [name for name in _READS_MODELS[plan.engine] if importlib.util.find_spec(name) is None]
    if missing:
        checked.not_checked.append(
            f"what kind of model {model.name} is and which layers it has: {missing[0]} is not installed here"
        )
        return
    engine = importlib.import_module(f"crosstune.{plan.engine}_engine.check_model")
    checked.warnings += engine.check_model(model.path, plan=plan)


def check_base_adapter(plan: Plan, model: ModelFolder) -> list[str]:
    """Return warnings about the adapter that a run starts from; raise if it was trained on another base."""
    adapter = plan.config.base_adapter
    if not adapter or plan.method not in ADAPTER_METHODS:
        return []
    return same_training.check_base(
        Path(adapter).expanduser(), identity=identity(model.path)["sha256"], quantization=plan.quant_spec
    )


def _check_data_name(name: str, checked: Checked) -> None:
    check_name(name)
    if not is_here(name):
        checked.not_checked.append(f"the data set {name}, which is fetched from the hub when training starts")


def _check_reading(config: Config, checked: Checked, *, elsewhere: bool) -> None:
    """Check --columns and --chat_template as far as that needs no data."""
    with naming("columns"):
        recipe = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
        parse_columns(config.columns, targets=getattr(recipe, "COLUMNS", TARGETS))
    template = config.chat_template
    if template is None:
        return
    if _is_only_elsewhere(template, elsewhere=elsewhere):
        checked.not_checked.append(f"the chat template {template}, which is not on this machine")
        return
    with naming("chat_template"):
        read_template(template)


def _is_only_elsewhere(path: str, *, elsewhere: bool) -> bool:
    return elsewhere and _looks_like_path(path) and not Path(path).expanduser().exists()


def _check_data(config: Config, checked: Checked, *, elsewhere: bool) -> None:
    """Check the rows of local data with the recipe's `check_data`, if it has one."""
    recipe = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    if not is_here(config.dataset):
        return
    if hasattr(recipe, "check_data"):
        folder = checked.model.path if checked.model is not None else None
        given = [path for path in (config.chat_template, config.tokenizer) if path]
        if any(_is_only_elsewhere(path, elsewhere=elsewhere) for path in given) or _lacks_tokenizer(config):
            folder = None  # the rows are read but not rendered
        checked.not_checked += recipe.check_data(config, model_folder=folder)
    else:
        checked.not_checked.append(f"the rows of {config.dataset}")


def _has_own_model_to_measure(config: Config, *, elsewhere: bool) -> bool:
    """Return whether the recipe brings its own model, and has data here, or data that it makes, which a plan may read."""
    recipe = load_plugin("crosstune.recipes", config.recipe, kind="recipe")
    return (
        not needs_base_model(config)
        and hasattr(recipe, "check_data")
        and not _is_only_elsewhere(config.dataset, elsewhere=elsewhere)
    )


def _check_base_adapter(plan: Plan, checked: Checked, *, elsewhere: bool) -> None:
    adapter = plan.config.base_adapter
    if not adapter:
        return
    if elsewhere and not Path(adapter).expanduser().exists():
        checked.not_checked.append(f"the adapter {adapter}, which is not on this machine")
        return
    folder = Path(adapter).expanduser()
    check_checksums(folder)
    read_settings(folder)
    if plan.method in ADAPTER_METHODS:
        check_settings(folder, AdapterSettings.from_config(plan.config, method=plan.method))


def _check_local_model(
    plan: Plan, checkpoint: Checkpoint | None, checked: Checked, *, elsewhere: bool
) -> None:
    name = plan.config.model_name
    if elsewhere and _looks_like_path(name) and not Path(name).expanduser().exists():
        checked.not_checked.append(f"the model {name}, which is not on this machine")
        return
    option = "llama_pro_path" if name == plan.config.llama_pro_path else "model_name"
    try:
        with naming(option):
            model = find_local(name, cache=cache_override())
    except UserError:
        if checkpoint is not None:
            return  # the training reports a missing base with the name from the checkpoint
        raise
    if model is None:
        checked.not_checked.append(f"the model {name}, which is fetched or converted when training starts")
        return
    check_model(plan, model, checked)
    checked.model = model
    check_base_adapter(plan, model)


def _check_tokenizer(config: Config, checked: Checked, *, elsewhere: bool) -> None:
    """Check the files of --tokenizer, and that they fit the model if that is on this machine."""
    if config.tokenizer is None:
        return
    folder = Path(config.tokenizer).expanduser()
    if _lacks_tokenizer(config):
        if elsewhere:
            checked.not_checked.append(f"the tokenizer {folder}, which is not on this machine")
            return
        raise UserError(
            f"There is no tokenizer folder {folder}.",
            do="give a folder with tokenizer.json; save_pretrained of a transformers tokenizer writes one",
        )
    if checked.model is not None:
        open_tokenizer(config, checked.model.path)
    else:
        Tokenizer.from_folder(folder)


def _lacks_tokenizer(config: Config) -> bool:
    return config.tokenizer is not None and not Path(config.tokenizer).expanduser().is_dir()


def _check_same_training(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise if options alone tell that the request is not the training of the checkpoint."""
    differences, _ = same_training.find_differences(
        plan,
        checkpoint.manifest,
        same_training.identity_of_options(plan),
        measured=resume.measured_before(checkpoint) is not None,
    )
    same_training.check_same(differences, plan.config)


def _continues(folder: Path, checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and resume.continues_in_place(folder, checkpoint)


def _is_packed_or_elsewhere(config: Config, *, elsewhere: bool) -> bool:
    """Return whether the run of --resume is an archive or on another machine."""
    path = Path(config.resume).expanduser()
    return path.is_file() or (elsewhere and not path.exists())


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~", "\\")) or bool(Path(name).suffix) or name.count("/") > 1
