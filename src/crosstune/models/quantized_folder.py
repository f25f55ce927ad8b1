"""Read the quantization of a model folder written by crosstune, bitsandbytes (4 bits), MLX or as gpt-oss (MXFP4), and its
dense sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.quantization import QuantSpec, wrong_spec
from crosstune.files.json_fields import OBJECT, TEXT, check_fields, list_of, map_of, object_with, whole
from crosstune.files.json_files import object_of, read_object
from crosstune.files.plain_files import UnreadableFile, open_plain
from crosstune.files.safetensors_header import read_header
from crosstune.models.folder import read_config_json, weight_files
from crosstune.models.identity import ORIGINAL, read_record

RECORD = "crosstune_quantization.json"
OWN_METHOD = "crosstune"
FORMAT = 2
"""Format 1 has the offset of doubly quantized scales in JSON, and quanto's description of a weight."""
_READ_FORMATS = (1, FORMAT)
_STATE_LIMIT = 1 << 20
_SHAPE = list_of(whole(0, 2**40))
_OWN = {
    "spec": OBJECT,
    "dtype": TEXT,
    "layers": map_of(object_with({"shape": _SHAPE})),
    "original": ORIGINAL,
}
_STATE = {"blocksize": whole(1, 2**20), "quant_type": TEXT, "shape": _SHAPE}
_STORED = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}
_COMPUTED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
MXFP4_PARTS = {"packed": "_blocks", "scales": "_scales"}
"""The ends of the names of a stack's tensors in gpt-oss' files."""
_SPARE_BYTES = 50_000_000
"""For the tokenizer and other small files."""
_PACKED_STATE = ".weight.quant_state.bitsandbytes__"


@dataclass(frozen=True, kw_only=True)
class FolderQuantization:
    spec: QuantSpec
    """The quantization of most layers; a layer that differs has its own `spec` in `layers`."""
    own: bool
    dtype: str
    """The compute dtype of the dequantized weights, as torch names it."""
    layers: dict[str, dict[str, Any]]
    """Layer -> its shape and other values that are not tensors."""
    original: dict[str, Any] | None = None
    """Name, path and identity of the weights that were quantized, if recorded."""


def quantization_options(spec: QuantSpec) -> dict[str, Any]:
    """Return the options for a recorded quantization."""
    options = {
        "quantization_backend": spec.quantizer,
        "n_bits": spec.bits,
        "group_size": spec.group_size,
    }
    if spec.quantizer == "mlx":  # supports a single kind
        return options
    return options | {"quant_type": spec.kind, "double_quant": spec.double}


def read_quantization(folder: Path) -> FolderQuantization | None:
    """Return the quantization of a folder; None for plain weights, and for formats that only transformers reads."""
    if (folder / RECORD).is_file():
        return _read_own(folder / RECORD)
    config = read_config_json(folder)
    if isinstance(config.get("quantization"), dict) and "group_size" in config["quantization"]:
        return _read_mlx(folder, config)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4":
        return _read_mxfp4(folder, config)
    if not isinstance(quantization, dict) or not quantization.get("load_in_4bit"):
        return None
    layers = _read_packed_states(folder)
    if not layers:
        raise UserError(
            f"{folder} is marked as 4-bit, but contains no 4-bit weights.",
            why=f"no tensor is named *{_PACKED_STATE}nf4 or fp4.",
            do="download or copy the model again",
        )
    first = next(iter(layers.values()))
    return FolderQuantization(
        spec=QuantSpec(
            quantizer="bnb",
            bits=4,
            group_size=first["blocksize"],
            kind=first["quant_type"],
            double="nested_blocksize" in first,
        ),
        own=False,
        dtype=quantization.get("bnb_4bit_compute_dtype") or config.get("dtype") or "bfloat16",
        layers=layers,
    )


def dense_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return tensor name -> dense shape of every weight; None for packed weights that only transformers reads."""
    quantized, entries = _read_dense(folder)
    if quantized is None and isinstance(read_config_json(folder).get("quantization_config"), dict):
        return None
    layers = quantized.layers if quantized is not None else {}
    shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
    return shapes | {f"{layer}.weight": tuple(facts["shape"]) for layer, facts in layers.items()}


def stored_format(folder: Path) -> str:
    """Return the dtype of most weights in a folder; a quantized weight counts with its compute dtype."""
    quantized, entries = _read_dense(folder)
    counts = Counter(_STORED[entry["dtype"]] for entry in entries.values() if entry["dtype"] in _STORED)
    if quantized is not None and quantized.dtype in _COMPUTED:
        counts[_COMPUTED[quantized.dtype]] += len(quantized.layers)
    return max(sorted(counts), key=lambda name: counts[name], default="fp32")


def dense_bytes(folder: Path, dtype: str = "auto") -> int:
    """Return the disk space of the weights in a plain folder, in `dtype` or in their stored dtypes."""
    quantized, entries = _read_dense(folder)
    if dtype in _ITEM_BYTES:
        total = sum(math.prod(entry["shape"]) for entry in entries.values()) * _ITEM_BYTES[dtype]
    else:
        total = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries.values())
    if quantized is not None:
        item_bytes = _ITEM_BYTES.get(dtype) or _ITEM_BYTES.get(_COMPUTED.get(quantized.dtype, ""), 4)
        total += item_bytes * sum(math.prod(facts["shape"]) for facts in quantized.layers.values())
    return total + _SPARE_BYTES


def _read_mlx(folder: Path, config: Mapping[str, Any]) -> FolderQuantization:
    """Read MLX's format: settings in config.json, the scales of a layer next to its packed weight."""
    form = config["quantization"]
    scales = {
        name.removesuffix(".scales"): entry["shape"]
        for path in weight_files(folder)
        for name, entry in read_header(path).tensors.items()
        if name.endswith(".scales")
    }
    record = read_record(folder)
    made = record.get("converted") or record.get("exported") or {}
    return FolderQuantization(
        spec=QuantSpec(quantizer="mlx", bits=form["bits"], group_size=form["group_size"], double=False),
        own=False,
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        layers={
            layer: {"shape": [*shape[:-1], shape[-1] * _group_size(form, layer)]}
            for layer, shape in scales.items()
        },
        original=made.get("original"),
    )


def _read_mxfp4(folder: Path, config: Mapping[str, Any]) -> FolderQuantization:
    """Read gpt-oss' format: the blocks of a stack of experts, with the scales next to them."""
    layers: dict[str, dict[str, Any]] = {}
    found = {
        name: (path, entry)
        for path in weight_files(folder)
        for name, entry in read_header(path).tensors.items()
        if name.endswith(tuple(MXFP4_PARTS.values()))
    }
    for name, (path, entry) in found.items():
        stack = name.removesuffix(MXFP4_PARTS["packed"])
        if stack == name:
            continue
        _, scales = found.get(f"{stack}{MXFP4_PARTS['scales']}", (path, {"dtype": "none", "shape": []}))
        shape = entry["shape"]
        if len(shape) != 4 or shape[3] != 16 or shape[:3] != scales["shape"]:
            why = f"{name} has the shape {shape}, and its scales {scales['shape'] or 'are missing'}; "
            raise UnreadableFile(path, f"{why}expected experts x rows x groups x 16, with a scale per group")
        if (entry["dtype"], scales["dtype"]) != ("U8", "U8"):
            raise UnreadableFile(
                path, f"{name} and its scales are {entry['dtype']} and {scales['dtype']}, not U8"
            )
        experts, rows, groups, half = shape
        layers |= {f"{stack}.{number}": {"shape": [rows, groups * half * 2]} for number in range(experts)}
    if not layers:
        raise UserError(
            f"{folder} is marked as mxfp4, but contains no mxfp4 weights.",
            why=f"no tensor is named *{MXFP4_PARTS['packed']}.",
            do="download or copy the model again",
        )
    return FolderQuantization(
        spec=QuantSpec(quantizer="mxfp4", bits=4, group_size=32, double=False),
        own=False,
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
        layers=layers,
    )


def _group_size(form: Mapping[str, Any], layer: str) -> int:
    override = form.get(layer)
    return int(override["group_size"] if isinstance(override, dict) else form["group_size"])


def _read_own(path: Path) -> FolderQuantization:
    record = read_object(path)
    if record.get("format") not in _READ_FORMATS:
        raise UserError(
            f"{path} has the format {shown(record.get('format'))}.",
            why=f"this version of crosstune reads formats up to {FORMAT}.",
        )
    check_fields(
        record, _OWN, required=("spec", "dtype", "layers"), source=path, do="convert the model again"
    )
    wrong = wrong_spec(record["spec"])
    if wrong is not None:
        raise UnreadableFile(path, f"spec in it cannot be read: {wrong}", do="convert the model again")
    return FolderQuantization(
        spec=QuantSpec.from_json(record["spec"]),
        own=True,
        dtype=record["dtype"],
        layers=record["layers"],
        original=record.get("original"),
    )


def _read_packed_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the quantization state of each layer; bitsandbytes stores it as JSON in a tensor."""
    layers: dict[str, dict[str, Any]] = {}
    for path in weight_files(folder):
        header = read_header(path)
        with open_plain(path) as file:
            for name, entry in header.tensors.items():
                layer, found, _ = name.partition(_PACKED_STATE)
                if found:
                    start, end = entry["data_offsets"]
                    file.seek(header.data_start + start)
                    raw = file.read(min(end - start, _STATE_LIMIT))
                    state = object_of(raw, Path(f"{path}: {name}"), foreign=True)
                    check_fields(state, _STATE, required=tuple(_STATE), source=path, place=f"{name}: ")
                    layers[layer] = state
    return layers


def _read_dense(folder: Path) -> tuple[FolderQuantization | None, dict[str, Any]]:
    """Return a folder's quantization, and the header entries of the tensors that are not part of a quantized layer."""
    quantized = read_quantization(folder)
    layers = quantized.layers if quantized is not None else {}
    is_mxfp4 = quantized is not None and quantized.spec.quantizer == "mxfp4" and not quantized.own
    entries = {
        name: entry
        for path in weight_files(folder)
        for name, entry in read_header(path).tensors.items()
        if name.removesuffix(".scales").removesuffix(".biases").partition(".weight")[0] not in layers
        and not (is_mxfp4 and name.endswith(tuple(MXFP4_PARTS.values())))
    }
    return quantized, entries
