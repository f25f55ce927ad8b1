"""Check a request before a run starts, so that `train` and `plan` reject the same requests."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from crosstune.config.conditions import ADAPTER_METHODS, work_of_rows
from crosstune.config.load import cache_override
from crosstune.config.recipe_spec import NOT_TOKENIZED, RecipeSpec, load_recipe
from crosstune.config.resolve.fit_compute import check_compiler
from crosstune.config.resolve.plan import Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, naming, raise_all
from crosstune.core.events import Observers
from crosstune.core.protocols import HasEvaluationData, HasLongestRows, HasMeanRow, HasPictures, Recipe
from crosstune.data.named_datasets import BUNDLED
from crosstune.data.preflight import is_local_dataset
from crosstune.data.read.columns import TARGETS, parse_columns
from crosstune.data.read.dataset_list import parse_dataset
from crosstune.data.read.sources import check_name
from crosstune.data.render.built_in_templates import read_template
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.estimate.machine import Machine
from crosstune.files.paths import named_run
from crosstune.files.run_lock import check_place
from crosstune.files.run_record import check_free
from crosstune.loop.profile import check_profile_folder
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import check_settings, read_settings
from crosstune.models.file_hashes import check_checksums
from crosstune.models.identity import identity
from crosstune.models.locate import ModelFolder, fetch_sizes, find_local
from crosstune.models.tiny import tiny_model
from crosstune.planner.gather import gather
from crosstune.planner.predict import DataFacts, OwnModel
from crosstune.process.ranks import Ranks
from crosstune.recipes.sft import open_tokenizer
from crosstune.runs.open_parts import with_rope
from crosstune.runs.open_recipe import open_recipe
from crosstune.runs.resume import ResumePoint, names_path, read_request, run_folder
from crosstune.runs.resume_identity import check_adapter_base, identity_of_options
from crosstune.tracking.observe import check_trackers

MAX_BYTES = 4 << 20
"""Larger data is not tokenized for a plan."""
STAND_IN = "stand-in"
TEMPLATE_TOKENS = 64
"""Tokens that a model's chat template may add to each row, such as a default system prompt."""
_READS_MODELS = {"torch": ("torch", "transformers", "accelerate"), "mlx": ("mlx", "mlx_lm")}
"""Engine -> packages needed to build a model from a folder."""


@dataclass
class RequestCheck:
    """The problems of a request, and the checks that this machine cannot make."""

    problems: list[UserError] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """Notes on the model, such as weights that get no adapter."""
    elsewhere: bool = False
    """True for a plan for a different machine, where paths may exist that are missing on this one."""
    data: DataFacts | None = None
    """The lengths of the data, if it is small."""
    model: ModelFolder | None = None
    """The model, if it is available locally and was checked."""
    own_model: OwnModel | None = None
    """The size and data of a recipe's own model, if its data is available locally."""

    def raise_problems(self) -> None:
        """Raise all problems at once, or a single one directly."""
        if len(self.problems) == 1:
            raise self.problems[0]
        raise_all(self.problems)

    @contextlib.contextmanager
    def collecting(self, option: str = "") -> Iterator[None]:
        """Collect an error raised in the `with` block, with the name of its option."""
        try:
            with naming(option) if option else contextlib.nullcontext():
                yield
        except UserError as error:
            if not any(_same(error, other) for other in self.problems):
                self.problems.append(error)

    def is_missing(self, path: str, *, is_name: bool = True) -> bool:
        """Return True if a path is missing but may exist on the other machine. Unless `is_name=False`, a string that does
        not look like a path is taken as a name."""
        looks_like_path = path.startswith((".", "/", "~", "\\")) or Path(path).suffix or path.count("/") > 1
        is_path = bool(looks_like_path) or not is_name
        return self.elsewhere and is_path and not Path(path).expanduser().exists()

    def skips(self, what: str, path: str, *, is_name: bool = True) -> bool:
        """Return True if a path can only be checked on the other machine; note that it was not checked."""
        if not self.is_missing(path, is_name=is_name):
            return False
        self.not_checked.append(f"the {what} {path}, which is not on this machine")
        return True


def _same(error: UserError, other: UserError) -> bool:
    """Return True if two errors report the same problem, even if only one mentions its option."""
    return error.lines() == other.lines() or (
        bool(error.do) and (error.why, error.do) == (other.why, other.do)
    )


def check_plan(
    config: Config, *, machine: Machine | None = None, ranks: Ranks | None = None
) -> tuple[Plan, RequestCheck]:
    """Plan a request and check it as `train` does before its first step, for this machine or for `machine`.

    The data is read, and tokenized if it is small; without the model, the tokens are counted roughly.
    """
    elsewhere, skipped, point = machine is not None, list[str](), None
    resumed = Path(named_run(config.resume, parent=config.output_dir)).expanduser()
    if names_path(config) and (resumed.is_file() or (elsewhere and not resumed.exists())):
        skipped.append(f"the run of --resume {config.resume}, which is packed or not on this machine")
    else:
        config, point = read_request(config, observer=Observers())
    recipe, folder = load_recipe(config.recipe), run_folder(config)
    if point is not None:
        skipped.append("whether data and model match the checkpoint")
    if recipe.needs_base_model:
        fetch_sizes(config.model_name, cache=cache_override())
    base = point.manifest.base_choice if point is not None else None
    facts = gather(config, machine=machine, ranks=ranks, base=base)
    plan = resolve(config, facts)
    checked = check_request(plan, folder=folder, point=point, elsewhere=elsewhere)
    checked.not_checked += skipped
    if not elsewhere:
        with checked.collecting():
            check_place(folder)  # `train` has already locked the folder
    if point is not None:
        with checked.collecting():
            point.compared(plan, identity_of_options(plan))
    with checked.collecting():
        _check_rows(plan.config, recipe, checked)
    if checked.problems:
        return plan, checked
    with checked.collecting("dataset"):
        if recipe.needs_base_model:
            if all(_is_small(names) for names in (plan.config.dataset, plan.config.eval_dataset) if names):
                checked.data = _measure_rows(plan.config, checked.model)
                if checked.data is not None and not checked.data.is_rough:
                    left = [each for each in checked.not_checked if not each.endswith(NOT_TOKENIZED)]
                    checked.not_checked[:] = left
        elif recipe.check_data and not checked.is_missing(config.dataset):
            opened = open_recipe(plan.config, None, Observers())
            parameters = opened.describe().get("model_parameters")
            checked.own_model = OwnModel(
                parameters=parameters,
                data=_measure(opened),
                activation_bytes=getattr(opened, "activation_bytes", None),
            )
    if checked.data is not None:
        rows, targets, patches = (checked.data.longest_row, checked.data.longest_target, checked.data.patches)
        plan = resolve(config, replace(facts, longest_row=rows, longest_target=targets, patches=patches))
    return plan, checked


def check_request(
    plan: Plan, *, folder: Path | None, point: ResumePoint | None = None, elsewhere: bool = False
) -> RequestCheck:
    """Check everything that needs no fetching, converting or tokenizing.

    `folder` is the run folder; None on ranks that do not write it. `elsewhere` marks a plan for a different machine.
    """
    config, checked = plan.config, RequestCheck(elsewhere=elsewhere)
    recipe = load_recipe(config.recipe)
    if plan.engine == "mlx" and plan.method == "llama_pro":
        checked.problems.append(
            UserError(
                "llama_pro does not train on MLX.",
                why=f"--train_type {config.train_type} adds blocks to a torch model.",
                do="use --train_type lora, or a torch backend",
            )
        )
    for option in recipe.data_options:
        with checked.collecting(option):
            _check_dataset(getattr(config, option), recipe, checked)
    with checked.collecting("columns"):
        parse_columns(config.columns, targets=recipe.columns or TARGETS)
    with checked.collecting("chat_template"):
        if config.chat_template is not None and not checked.skips("chat template", config.chat_template):
            read_template(config.chat_template)
    if elsewhere:
        checked.not_checked.append("if the run's name is already in use there")
    else:
        _check_this_machine(plan, checked, folder=folder, point=point)
    if not recipe.needs_base_model:
        _check_own_model(plan, recipe, checked)
        return checked
    with checked.collecting("base_adapter"):
        adapter = config.base_adapter
        if adapter and not checked.skips("adapter", adapter, is_name=False):
            folder = Path(adapter).expanduser()
            check_checksums(folder)
            read_settings(folder)
            if plan.method in ADAPTER_METHODS:
                check_settings(folder, AdapterSettings.from_config(config, method=plan.method))
    with checked.collecting():
        _check_local_model(plan, point, checked)
    with checked.collecting("tokenizer"):
        if config.tokenizer is not None and not checked.skips("tokenizer", config.tokenizer, is_name=False):
            _check_tokenizer(config, checked)
    return checked


def check_model(plan: Plan, model: ModelFolder, checked: RequestCheck) -> None:
    """Raise if the engine does not support the model; add its warnings, or the reason why it could not be checked."""
    missing = [name for name in _READS_MODELS[plan.engine] if importlib.util.find_spec(name) is None]
    if missing:
        checked.not_checked.append(
            f"the architecture and layers of {model.name}: {missing[0]} is not installed"
        )
        return
    engine = importlib.import_module(f"crosstune.{plan.engine}_engine.open")
    checked.warnings += engine.check_model(model.path, plan=plan)


def check_base_adapter(plan: Plan, model: ModelFolder) -> list[str]:
    """Return warnings about --base_adapter; raise if it was trained on a different base."""
    adapter = plan.config.base_adapter
    if not adapter or plan.method not in ADAPTER_METHODS:
        return []
    return check_adapter_base(
        Path(adapter).expanduser(), identity=identity(model.path)["sha256"], quantization=plan.quant_spec
    )


def _check_dataset(names: str | None, recipe: RecipeSpec, checked: RequestCheck) -> None:
    for entry in parse_dataset(names) if names is not None else ():
        if checked.skips("data", entry.name):
            continue
        if recipe.check_dataset is not None:
            recipe.check_dataset(entry.name)
            continue
        check_name(entry.name)
        if not is_local_dataset(entry.name):
            checked.not_checked.append(f"the dataset {entry.name}, which is fetched when training starts")


def _check_this_machine(
    plan: Plan, checked: RequestCheck, *, folder: Path | None, point: ResumePoint | None
) -> None:
    config = plan.config
    with checked.collecting():
        check_trackers(config)
    with checked.collecting("torch_compile"):
        check_compiler(plan)
    if (check_files := load_recipe(config.recipe).check_files) is not None:
        with checked.collecting():
            check_files(config)
    if folder is None:
        return
    if not config.overwrite and not (point is not None and point.is_in(folder)):
        with checked.collecting():
            check_free(folder, resuming=config.resume != "none")
    with checked.collecting():
        check_profile_folder(config, folder)


def _check_own_model(plan: Plan, recipe: RecipeSpec, checked: RequestCheck) -> None:
    """Check the options of a recipe that builds its own model."""
    config = plan.config
    if recipe.check_options is not None:
        checked.problems += recipe.check_options(config)
    elif plan.quantizer != "none" or plan.method == "llama_pro":
        checked.problems.append(
            UserError(
                f"--train_type {config.train_type} does not work with the {config.recipe} recipe.",
                why="it starts from a base model, and the recipe builds its own model.",
                do="use --train_type full or lora",
            )
        )
    checked.not_checked.append(f"the model of the {config.recipe} recipe and its layers")


def _check_local_model(plan: Plan, point: ResumePoint | None, checked: RequestCheck) -> None:
    name = plan.config.model_name
    if checked.skips("model", name):
        return
    option = "llama_pro_path" if name == plan.config.llama_pro_path else "model_name"
    try:
        with naming(option):
            model = find_local(name, cache=cache_override())
    except UserError:
        if point is not None:
            return  # the run reports a missing base with its name from the checkpoint
        raise
    if model is None:
        checked.not_checked.append(f"the model {name}, which is fetched or converted when training starts")
        return
    model = with_rope(plan.config, model)
    check_model(plan, model, checked)
    checked.model = model
    check_base_adapter(plan, model)


def _check_tokenizer(config: Config, checked: RequestCheck) -> None:
    """Check the files of --tokenizer, and that they match a model that is available locally."""
    folder = Path(config.tokenizer or "").expanduser()
    if not folder.is_dir():
        raise UserError(
            f"There is no tokenizer folder {folder}.",
            do="pass a folder with tokenizer.json; save_pretrained of a transformers tokenizer writes one",
        )
    if checked.model is not None:
        open_tokenizer(config, checked.model.path)
    else:
        Tokenizer.from_folder(folder)


def _check_rows(config: Config, recipe: RecipeSpec, checked: RequestCheck) -> None:
    """Check the rows of local data, if the recipe can check them without opening the data."""
    if not is_local_dataset(config.dataset):
        return
    if recipe.check_data is None:
        checked.not_checked.append(f"the rows of {config.dataset}")
        return
    folder = checked.model.path if checked.model is not None else None
    lacks_tokenizer = config.tokenizer is not None and not Path(config.tokenizer).expanduser().is_dir()
    if checked.is_missing(config.chat_template or "") or lacks_tokenizer:
        folder = None  # the rows are read but not rendered
    checked.not_checked += recipe.check_data(config, model_folder=folder)


def _is_small(names: str) -> bool:
    """Return True for data in small local files, which are quickly tokenized."""
    paths = [Path(entry.name).expanduser() for entry in parse_dataset(names) if entry.name not in BUNDLED]
    return all(path.is_file() for path in paths) and sum(path.stat().st_size for path in paths) <= MAX_BYTES


def _measure_rows(config: Config, model: ModelFolder | None) -> DataFacts | None:
    """Return the lengths of the rows in tokens. Without the model, count requested data with a small stand-in tokenizer."""
    if model is not None:
        return _measure(open_recipe(config, model, Observers()))
    if "dataset" not in config.sources:
        return None
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(UserError):
        folder = tiny_model(Path(scratch) / STAND_IN, max_context=config.context_length)
        stand_in = ModelFolder(name=STAND_IN, path=folder, source="bundled")
        own = replace(config, truncation="cut", tokenizer=None, chat_template=None)
        found = _measure(open_recipe(own, stand_in, Observers()))
        if found is not None:
            most = work_of_rows(config.options()).num_answers * config.context_length
            longest = min(most, found.longest_row + TEMPLATE_TOKENS)
            return replace(found, longest_row=longest, longest_target=longest, is_rough=True)
    return None


def _measure(recipe: Recipe) -> DataFacts | None:
    """Return the lengths of tokenized rows; None for a recipe without rows to measure."""
    if not isinstance(recipe, HasLongestRows):
        return None
    described, rows = recipe.describe().get("train", {}), recipe.num_rows()
    return DataFacts(
        num_rows=rows,
        num_steps=recipe.num_steps(),
        longest_row=recipe.longest_row(),
        longest_target=recipe.longest_target(),
        patches=recipe.most_patches() if isinstance(recipe, HasPictures) else 0,
        tokens_per_row=recipe.tokens_per_row()
        if isinstance(recipe, HasMeanRow)
        else described.get("tokens", 0) / max(1, rows) or recipe.longest_row(),
        evaluates=not isinstance(recipe, HasEvaluationData) or recipe.eval_identity() is not None,
    )
