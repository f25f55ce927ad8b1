"""Find the base model, adapter and training settings of a run folder, an adapter folder or a model name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.config.recipe_spec import next_commands, read_options
from crosstune.config.schema import Config
from crosstune.core.errors import UserError, shown
from crosstune.core.names import nearest
from crosstune.core.quantization import BaseChoice, QuantSpec, read_spec, recorded_choice
from crosstune.estimate.vision import FAMILIES, is_tower
from crosstune.files.json_fields import NOTHING, TEXT, check_fields
from crosstune.files.json_files import read_json
from crosstune.files.paths import missing_run, sibling_runs
from crosstune.files.safetensors_header import read_header
from crosstune.models.adapter_files import canonical_name, check_kind, read_settings
from crosstune.models.bundled import BUNDLED
from crosstune.models.file_hashes import check_checksums
from crosstune.models.identity import identity, read_record, recorded_sha256
from crosstune.models.locate import ModelFolder
from crosstune.models.quantized_folder import quantization_options
from crosstune.runs.resume_identity import different_base


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained target. For a whole model, `adapter` is None and `base` is its name."""

    base: str
    home: Path | None
    """The run, adapter or model folder; None for a model that is not a local folder."""
    is_run: bool = False
    method: str | None = None
    adapter: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The contents of adapter_config.json."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The contents of crosstune.json: identity and quantization of the base, precision. Empty for a foreign adapter."""

    @property
    def quantization(self) -> QuantSpec | None:
        return read_spec(self.record.get("quantization"))

    @property
    def base_choice(self) -> BaseChoice | None:
        """The recorded choice of the base, for `make_plan`."""
        return recorded_choice(self.quantization)

    @property
    def new_blocks(self) -> frozenset[int]:
        """Blocks that llama_pro added to a whole model."""
        return frozenset(self.record.get("new_blocks", ()))

    @property
    def precision(self) -> str:
        return str(self.record.get("precision") or "auto")

    @property
    def why_merged(self) -> str:
        """Why other programs cannot apply the adapter, and need it merged; empty if they can."""
        if self.settings.get("use_dora"):
            return "it is a DoRA adapter, and its magnitudes are not applied"
        if self.settings.get("modules_to_save"):
            return f"it trained {', '.join(self.settings['modules_to_save'])} in full"
        if self.settings.get("target_parameters"):
            return "it adapts experts"
        if self.record.get("rope_scaling"):
            return "the positions of its base were scaled by --rope_scaling, which an adapter cannot carry"
        return "it added tokens" if self.record.get("add_tokens") else ""

    def options(self, *, quantized: bool = True) -> dict[str, Any]:
        """Return the options to open the trained session again, on the quantized or the unquantized base."""
        if self.adapter is None:
            return {"model_name": self.base, "train_type": "full"}
        options = {
            "model_name": self.base,
            "train_type": "dora" if self.settings.get("use_dora") else "lora",
            "base_adapter": str(self.adapter),
            "lora_rank": self.settings["r"],
            "lora_alpha": self.settings["lora_alpha"],
            "use_rslora": bool(self.settings.get("use_rslora")),
            "lora_target_modules": _targets(self.adapter, self.settings),
            "layers_to_transform": _layers(self.settings.get("layers_to_transform")),
            "modules_to_save": ",".join(self.settings.get("modules_to_save") or ()) or None,
            "add_tokens": self.record.get("add_tokens"),
            **dict(self.record.get("rope_scaling") or {}),
            "precision": self.precision,
        }
        if _adapts_tower(self.adapter):
            options["train_vision_tower"] = True
        spec = self.quantization if quantized else None
        return options | (quantization_options(spec) if spec else {})

    def tokenizer_folder(self, model: Path) -> Path:
        """Return the tokenizer folder: the adapter's if present, otherwise the base model's."""
        adapter = self.adapter
        return adapter if adapter is not None and (adapter / "tokenizer.json").is_file() else model

    def result_path(self, suffix: str) -> Path:
        """Return the default result folder: in a run, next to an adapter or model folder, or in the current folder."""
        if self.home is None:
            return Path(f"{Path(self.base).name}-{suffix}").absolute()
        return self.home / suffix if self.is_run else self.home.with_name(f"{self.home.name}-{suffix}")


def find_trained(target: str, *, base: str | None = None) -> Trained:
    """Read a run folder, an adapter folder or a model name; `base` overrides the recorded base model."""
    folder = Path(target).expanduser().absolute()
    _check_exists(target, folder)
    is_run = (folder / "plan.json").is_file()
    if is_run:
        _check_language_model(folder)
    method = read_json(folder / "plan.json").get("method")
    check_fields({"method": method}, {"method": TEXT | NOTHING}, source=folder / "plan.json")
    place = _result_of_run(folder) if is_run else folder
    found = Trained(
        base=str(place) if place.is_dir() else target,
        home=folder if place.is_dir() else None,
        is_run=is_run,
        method=method,
        record=read_record(place),
    )
    if not (place / "adapter_config.json").is_file():
        return found
    check_checksums(place)
    settings = read_settings(place)
    check_kind(place, settings)
    base = base or _base_of(place, settings.get("base_model_name_or_path"), found.record)
    return replace(found, base=base, adapter=place, settings=settings)


def check_base(trained: Trained, model: ModelFolder, *, force: bool = False) -> list[str]:
    """Raise if the adapter was trained on a different base; return warnings."""
    if trained.adapter is None:
        return []
    if recorded_sha256(trained.record) is None:
        return [f"{trained.adapter} does not record the identity of its base model; the base was not checked"]
    do = "pass the right base with --base, or use this one with --force"
    found = identity(model.path)["sha256"]
    error = different_base(trained.adapter, trained.record, found, do=do, base=str(model.path))
    if error is not None and not force:
        raise error
    return [f"{error.message} {error.why}"] if error is not None else []


def _check_exists(target: str, folder: Path) -> None:
    """Raise for a missing run: a path next to other runs, or in the default runs folder."""
    if folder.exists() or target in BUNDLED or folder.suffix == ".gguf":
        return
    runs = [run.name for run in sibling_runs(folder)]
    is_name = "/" not in target  # a model's, unless a run has a similar name
    in_runs = Path(target).parent == Path(Config().output_dir)
    if nearest(folder.name, runs) or (runs and not is_name) or in_runs:
        raise missing_run(target)


def _check_language_model(run: Path) -> None:
    """Raise for a run whose recipe trains a different kind of model."""
    if read_json(run / "summary.json").get("generates") is False:
        options = read_options(run)
        recipe = options.get("recipe") if isinstance(options, dict) else None
        commands = " or ".join(command for _, command in next_commands(str(run), options))
        raise UserError(
            f"The run {run} did not train a language model.",
            why=f"the {recipe} recipe does not produce a text-generation model, so there is nothing to generate from or merge.",
            do=f"use: {commands}" if commands else f"use the weights in {run} with the code of the recipe",
        )


def _result_of_run(folder: Path) -> Path:
    for name in ("adapter", "model"):
        if (folder / name).is_dir():
            return folder / name
    raise UserError(
        f"The run {folder} has neither an adapter nor a model.",
        why="it did not finish a step, or ran with --save_model false.",
    )


def _targets(adapter: Path, settings: Mapping[str, Any]) -> str:
    """Return --lora_target_modules for the adapter: the full names of its layers and expert stacks if its weights are
    there, since PEFT's list may contain layers that the model lacks."""
    written, parameters = settings["target_modules"], settings.get("target_parameters") or ()
    file = adapter / "adapter_model.safetensors"
    if not file.is_file():
        return written if isinstance(written, str) else ",".join([*(written or ()), *parameters])
    if isinstance(written, str) and not parameters:
        return written
    names = (canonical_name(name, parameters) for name in read_header(file)[0])
    layers = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    if parameters:
        return ",".join(sorted(layers))
    return ",".join(
        word for word in written or () if any(f".{layer}".endswith(f".{word}") for layer in layers)
    )


def _adapts_tower(adapter: Path) -> bool:
    """Return True if layers that read pictures have adapters."""
    file = adapter / "adapter_model.safetensors"
    names = read_header(file)[0] if file.is_file() else ()
    return any(".lora_" in name and is_tower(name, family) for name in names for family in FAMILIES.values())


def _layers(written: int | list[int] | None) -> str | None:
    """Return --layers_to_transform for PEFT's setting; an empty list means all layers."""
    numbers = written if isinstance(written, list) else [] if written is None else [written]
    return ",".join(map(str, numbers)) or None


def _base_of(folder: Path, written: str | None, record: Mapping[str, Any]) -> str:
    """Return the base model of adapter_config.json; if that folder does not exist, the name used in training."""
    if not written or not written.isprintable():
        raise UserError(
            f"The adapter {folder} does not specify its base model.",
            why=f"base_model_name_or_path in its adapter_config.json is {shown(written)}.",
            do="write the name or path of the base model there",
        )
    if not Path(written).is_absolute() or Path(written).is_dir():
        return written
    return str((record.get("base") or {}).get("name") or written)
