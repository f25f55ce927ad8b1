"""Write, read and check adapter folders in PEFT's layout: matrices, settings, tokenizer and chat template."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from crosstune.config.schema import Config
from crosstune.core.errors import UserError, shown
from crosstune.core.protocols import Array
from crosstune.files.atomic_files import put_new, staging_folder
from crosstune.files.json_fields import FLAG, NOTHING, OBJECT, TEXT, Rule, check_fields, list_of, real, whole
from crosstune.files.json_files import read_json, read_object, write_json
from crosstune.files.plain_files import MissingFile, check_regular_files
from crosstune.models.adapter_choice import STACKS, AdapterSettings, Targets
from crosstune.models.identity import RECORD, read_record
from crosstune.models.llama_layout import CHAT_TEMPLATE
from crosstune.models.weights import Tensor, read_arrays, to_float32, write_safetensors

SETTINGS = "adapter_config.json"
PEFT_PREFIX = "base_model.model."
PEFT_WEIGHTS = "adapter_model.safetensors"
GENERATION = "generation_config.json"
UNREAD = ("rank_pattern", "alpha_pattern", "layer_replication")
"""Features of PEFT that crosstune does not read."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    GENERATION,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of vision-language models, which say how pictures become tensors."""
_SWITCH = FLAG | NOTHING
_NUMBER = real(-1e30, 1e30)
_RANK = whole(1, 2**16)
_LAYER = whole(0, 9999)
_PEFT: Mapping[str, Rule] = {
    "peft_type": TEXT | NOTHING,
    "base_model_name_or_path": TEXT | NOTHING,
    "r": _RANK,
    "lora_alpha": _NUMBER,
    "lora_dropout": real(0, 1),
    "target_modules": TEXT | list_of(TEXT) | NOTHING,
    "target_parameters": list_of(TEXT) | NOTHING,
    "layers_to_transform": _LAYER | list_of(_LAYER) | NOTHING,
    "fan_in_fan_out": _SWITCH,
    "use_rslora": _SWITCH,
    "use_dora": _SWITCH,
    "bias": TEXT | NOTHING,
    "modules_to_save": list_of(TEXT) | NOTHING,
    "ensure_weight_tying": _SWITCH,
}
_MLX: Mapping[str, Rule] = {
    "fine_tune_type": TEXT,
    "num_layers": whole(-1, 2**20) | NOTHING,
    "model": TEXT | NOTHING,
    "lora_parameters": OBJECT,
    "peft": OBJECT | NOTHING,
}
_MLX_LORA: Mapping[str, Rule] = {
    "rank": _RANK,
    "scale": _NUMBER,
    "dropout": real(0, 1),
    "keys": list_of(TEXT) | NOTHING,
}
_LORA_NEEDS = ("r", "lora_alpha", "target_modules")


def save_adapter(
    folder: Path,
    tensors: Mapping[str, Array],
    *,
    settings: AdapterSettings,
    targets: Targets,
    base: Path | None,
    base_name: str | None = None,
    record: Mapping[str, Any],
    starts: Mapping[str, tuple[Array, Array]] = MappingProxyType({}),
) -> None:
    """Write an adapter folder. `tensors` are in fp32, by canonical name; `base_name` is the base's hub id, if any;
    `record`, with the base's identity and quantization, goes into crosstune.json.

    `starts` has the initial A and B of layers where they were subtracted from the base (PiSSA). They are subtracted from the
    adapter too, which then has twice the rank, so that it belongs to the unchanged base.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if starts:
        tensors, settings = dict(tensors), settings.doubled()
        for layer, (a, b) in starts.items():
            first, second = f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"
            tensors[first] = np.concatenate([tensors[first], a])
            tensors[second] = np.concatenate([tensors[second], -b], axis=1)
    tensors = {**tensors, **{name: tensors[source] for name, source in targets.tied.items()}}
    write_safetensors(
        folder / PEFT_WEIGHTS,
        [
            Tensor(name=name, dtype="F32", shape=array.shape, rows=[array])
            for name, array in sorted(
                (peft_name(name, targets.stacks), array) for name, array in tensors.items()
            )
        ],
    )
    write_json(folder / SETTINGS, peft_settings(settings, targets, base=base_name or str(base or "")))
    write_json(folder / RECORD, record)
    if base is not None:
        copy_tokenizer(base, folder)


def changes_to_base(config: Config) -> dict[str, Any]:
    """Return the fields of an adapter's record for options that change the base: an adapter works with the changed one only."""
    rope = {"rope_scaling": config.rope_scaling, "rope_factor": config.rope_factor}
    return {
        "add_tokens": config.add_tokens,
        "rope_scaling": rope if config.rope_scaling != "none" else None,
    }


def peft_name(name: str, stacks: Collection[str]) -> str:
    """Return PEFT's name for an adapter's tensor.

    PEFT wraps a module once per adapted parameter, in the order in which the module defines them: the last has the
    module's name, the one before it the name of the module's `base_layer`.
    """
    stack, found, part = name.rpartition(".lora_")
    if stack not in stacks or not found:
        return PEFT_PREFIX + name
    module, _, parameter = stack.rpartition(".")
    outer = [later for later in STACKS[STACKS.index(parameter) + 1 :] if f"{module}.{later}" in stacks]
    return f"{PEFT_PREFIX}{module}{'.base_layer' * len(outer)}.lora_{part}"


def canonical_name(name: str, parameters: Collection[str]) -> str:
    """Return the canonical name of an adapter's tensor in a PEFT file; `parameters` are PEFT's target_parameters."""
    layer, found, part = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    if not found:  # a module trained in full
        return name.removeprefix(PEFT_PREFIX)
    module = layer
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    wrapped = [
        stack
        for stack in STACKS
        if any(f".{module}.{stack}".endswith(f".{parameter}") for parameter in parameters)
    ]
    depth = layer.count(".base_layer")
    if depth >= len(wrapped):
        return name.removeprefix(PEFT_PREFIX)
    return f"{module}.{wrapped[-1 - depth]}.lora_{part}"


def peft_settings(settings: AdapterSettings, targets: Targets, *, base: str) -> dict[str, Any]:
    """Return the contents of PEFT's adapter_config.json."""
    written: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "fan_in_fan_out": targets.fan_in_fan_out,
        "init_lora_weights": True,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        # PEFT does not load experts with dropout, even for inference.
        "lora_dropout": 0.0 if targets.parameters else settings.dropout,
        "use_rslora": settings.rank_stabilized,
        "use_dora": settings.magnitudes,
        "target_modules": list(targets.modules),
        "modules_to_save": list(targets.saved) or None,
    }
    if targets.tied:
        written["ensure_weight_tying"] = True
    if targets.layers is not None:
        written["layers_to_transform"] = list(targets.layers)
    return written | ({"target_parameters": list(targets.parameters)} if targets.parameters else {})


def load_adapter(
    folder: Path,
    wanted: Mapping[str, tuple[int, ...]],
    *,
    settings: AdapterSettings,
    tied: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Array]:
    """Return the tensors of a PEFT adapter folder after checking its settings and their shapes; `tied` has the names that
    share the values of another parameter."""
    check_settings(folder, settings)
    written = read_settings(folder)
    tensors = without_tied(folder, read_matrices(folder, written), written, tied=tied)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    if wrong := sorted(name for name, _ in wanted.items() ^ shapes.items()):
        raise UserError(
            f"The adapter {folder} does not match this model and its adapter options.",
            why=f"matrices are missing, unexpected or of a different shape, such as {wrong[0]}.",
            do="use the model, --train_type, --lora_rank, --lora_target_modules and --modules_to_save it was trained with",
        )
    return tensors


def without_tied(
    folder: Path, tensors: Mapping[str, Array], settings: Mapping[str, Any], *, tied: Mapping[str, str]
) -> dict[str, Array]:
    """Return the tensors without copies of shared tensors, such as the head of a tied model; raise if the adapter trained
    them separately."""
    if not settings.get("ensure_weight_tying") and any(
        name in tensors for name in (*tied.keys(), *tied.values())
    ):
        raise UserError(
            f"The adapter {folder} does not match this model.",
            why="it trained the embedding apart from the output head, but the model has one weight for both.",
            do="train it with ensure_weight_tying in PEFT, or with --modules_to_save in crosstune",
        )
    return {name: array for name, array in tensors.items() if name not in tied}


def read_matrices(folder: Path, settings: Mapping[str, Any]) -> dict[str, Array]:
    """Return the matrices of a PEFT adapter folder in fp32, by canonical name."""
    path = folder / PEFT_WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.")
    parameters = settings.get("target_parameters") or ()
    return {
        canonical_name(name, parameters): to_float32(*stored) for name, stored in read_arrays(path).items()
    }


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the contents of adapter_config.json after checking the types of its fields."""
    path = folder / SETTINGS
    check_regular_files(folder)
    try:
        settings = read_object(path, foreign=True)
    except MissingFile as error:
        raise UserError(f"{folder} is not an adapter folder.", why=f"it has no {path.name}.") from error
    if "fine_tune_type" in settings or "lora_parameters" in settings:
        check_fields(settings, _MLX, required=("lora_parameters",), source=path)
        inner = settings["lora_parameters"]
        check_fields(inner, _MLX_LORA, required=("rank", "scale"), source=path, place="lora_parameters.")
        _check_peft(settings.get("peft") or {}, path, place="peft.")
    else:
        _check_peft(settings, path)
    return settings


def _check_peft(settings: Mapping[str, Any], path: Path, *, place: str = "") -> None:
    needs = _LORA_NEEDS if settings.get("peft_type") == "LORA" else ()
    check_fields(settings, _PEFT, required=needs, source=path, place=place)


def check_settings(folder: Path, settings: AdapterSettings) -> None:
    """Check that rank, scale and kind of an adapter match the options."""
    config = read_settings(folder)
    check_kind(folder, config)
    pairs = {
        "lora_rank": (config["r"], settings.rank),
        "lora_alpha": (config["lora_alpha"], settings.alpha),
        "use_rslora": (bool(config.get("use_rslora")), settings.rank_stabilized),
        "dora": (bool(config.get("use_dora")), settings.magnitudes),
    }
    wrong = [f"{name} is {theirs}, not {ours}" for name, (theirs, ours) in pairs.items() if theirs != ours]
    if wrong:
        raise UserError(
            f"The adapter {folder} does not match the adapter options.",
            why="; ".join(wrong) + ".",
            do="use the options it was trained with",
        )


def check_kind(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise unless the settings describe a plain LoRA or DoRA adapter in PEFT's layout."""
    if "fine_tune_type" in settings:
        raise UserError(
            f"{folder} contains an adapter in mlx-lm's layout.",
            do=f"convert it first: crosstune convert {shlex.quote(str(folder))} --to peft",
        )
    unread = [name for name in UNREAD if settings.get(name)]
    if settings.get("peft_type") != "LORA" or settings.get("bias", "none") != "none" or unread:
        kind = f"{shown(settings.get('peft_type'))}, bias {shown(settings.get('bias'))}"
        raise UserError(
            f"{folder} contains an unsupported kind of adapter.",
            why=f"it uses {', '.join(unread) or kind}; only plain LoRA and DoRA are supported.",
        )


def keep_adapter(source: Path, target: Path) -> None:
    """Copy the files that `load_adapter` reads to a new folder."""
    if target.exists():
        return
    with staging_folder(target) as staged:
        for name in (SETTINGS, PEFT_WEIGHTS, RECORD):
            if (source / name).is_file():
                shutil.copyfile(source / name, staged / name)
        put_new(staged, target)


def copy_tokenizer(source: Path, target: Path, *, processor: bool = True) -> None:
    """Copy the files of the tokenizer, and of the `processor` of pictures if there is one."""
    for name in TOKENIZER_FILES + PROCESSOR_FILES * processor:
        if (source / name).exists():
            shutil.copy2(source / name, target / name)


def save_template(folder: Path, template: str, *, stop_ids: Collection[int]) -> None:
    """Save the chat template and stop tokens of training in a result, and note them in its record."""
    (folder / CHAT_TEMPLATE).write_text(template, encoding="utf-8")
    _drop_own_template(folder)
    settings = read_json(folder / GENERATION, foreign=True)
    write_json(folder / GENERATION, settings | {"eos_token_id": sorted(stop_ids)})
    write_json(folder / RECORD, read_record(folder) | {"chat_template": "trained"})


def has_trained_template(folder: Path) -> bool:
    """Return True if a result was trained with a chat template other than its base model's."""
    return bool(read_record(folder).get("chat_template")) and (folder / CHAT_TEMPLATE).is_file()


def replace_tokenizer(source: Path, target: Path) -> None:
    """Replace the tokenizer files in `target` with those in `source`."""
    for name in TOKENIZER_FILES:
        if name != GENERATION:  # it also lists stop tokens
            (target / name).unlink(missing_ok=True)
    copy_tokenizer(source, target, processor=False)


def copy_template(adapter: Path, model: Path) -> None:
    """Copy the adapter's chat template to a model without one; a template set for training replaces the model's."""
    if has_trained_template(adapter):
        for name in (CHAT_TEMPLATE, GENERATION):
            if (adapter / name).is_file():
                shutil.copy2(adapter / name, model / name)
        _drop_own_template(model)
        return
    known = "chat_template" in read_json(model / "tokenizer_config.json", foreign=True)
    if not known and not (model / CHAT_TEMPLATE).exists() and (adapter / CHAT_TEMPLATE).exists():
        shutil.copy2(adapter / CHAT_TEMPLATE, model / CHAT_TEMPLATE)


def _drop_own_template(folder: Path) -> None:
    """Remove the template from tokenizer_config.json: some tools would read it before the template file."""
    path = folder / "tokenizer_config.json"
    settings = read_json(path, foreign=True)
    if "chat_template" in settings:
        del settings["chat_template"]
        write_json(path, settings)
