"""Read and write model folders with quantized weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.config.conditions import TRAIN_TYPE_PARTS
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec, read_quantizers, same_quantization
from crosstune.files.json_files import write_json
from crosstune.models.folder import read_config_json
from crosstune.models.quantized_folder import (
    FORMAT,
    MXFP4_PARTS,
    OWN_METHOD,
    RECORD,
    FolderQuantization,
    read_quantization,
)
from crosstune.torch_engine.loading.stream import Place, find_tensors, read_slice, read_tensor
from crosstune.torch_engine.loading.weight_forms import WeightForm, single_form, weight_forms
from crosstune.torch_engine.quantized import StoredWeight, open_quantizer, restore_weight


@dataclass(frozen=True)
class Prequantized:
    """A model folder with quantized weights."""

    folder: Path
    facts: FolderQuantization

    @property
    def spec(self) -> QuantSpec:
        return self.facts.spec

    @cached_property
    def layers(self) -> set[str]:
        return set(self.facts.layers)

    @property
    def compute(self) -> torch.dtype:
        dtype = getattr(torch, self.facts.dtype, None)
        assert isinstance(dtype, torch.dtype), self.facts.dtype
        return dtype

    @cached_property
    def places(self) -> dict[str, Place]:
        return find_tensors(self.folder)

    @cached_property
    def dense(self) -> dict[str, Place]:
        """Tensors that are not part of a quantized weight."""
        if self.is_mxfp4:
            held = {
                f"{layer.rpartition('.')[0]}{end}" for layer in self.layers for end in MXFP4_PARTS.values()
            }
        else:
            held = {f"{layer}.weight{part}" for layer, parts in self._parts.items() for part in parts}
        return {name: place for name, place in self.places.items() if name not in held}

    @property
    def is_mxfp4(self) -> bool:
        """True for stacks of experts in gpt-oss' own format."""
        return self.spec.quantizer == "mxfp4" and not self.facts.own

    def forms(self, model: nn.Module) -> dict[str, WeightForm]:
        """Return the quantized weights by parameter. Expert stacks are stored matrix by matrix."""
        found = {
            name: form
            for name, form in weight_forms(model).items()
            if form.stacked and self.layers.issuperset(form.matrices)
        }
        for form in found.values():
            stored = tuple(self.facts.layers[form.matrices[0]]["shape"])
            if stored != form.shape:
                raise UserError(
                    f"The files in {self.folder} do not match its config.json.",
                    why=f"{form.parameter} has matrices of {stored} in the files, of {form.shape} by config.json.",
                    do="fetch the model again, or correct config.json",
                )
        for layer in self.layers.difference(*(form.matrices for form in found.values())):
            rows, columns = self.facts.layers[layer]["shape"]
            found[f"{layer}.weight"] = single_form(layer, (rows, columns))
        return found

    def layer_spec(self, layer: str) -> QuantSpec:
        """Return the quantization of a layer; it may differ from the folder's."""
        spec = self.facts.layers[layer].get("spec")
        return self.spec if spec is None else QuantSpec.from_json(spec)

    def stored(self, layer: str, device: torch.device) -> StoredWeight:
        """Read the quantized weight of a layer."""
        if self.is_mxfp4:
            stack, _, number = layer.rpartition(".")
            slices = {
                part: read_slice(self.places[f"{stack}{end}"], int(number)).to(device)
                for part, end in MXFP4_PARTS.items()
            }
            return restore_weight("mxfp4", slices, self.facts.layers[layer])
        tensors = {
            part.removeprefix("."): read_tensor(place).to(device)
            for part, place in self._parts[layer].items()
            if not part.startswith(".quant_state.")
        }
        facts = {name: value for name, value in self.facts.layers[layer].items() if name != "spec"}
        if not self.facts.own:
            tensors["packed"] = tensors.pop("")  # `LAYER.weight` itself
        return restore_weight(self.layer_spec(layer).quantizer, tensors, facts)

    @cached_property
    def _parts(self) -> dict[str, dict[str, Place]]:
        """The tensors of each quantized weight, by the end of their name."""
        parts: dict[str, dict[str, Place]] = {}
        for name, place in self.places.items():
            layer, found, part = name.partition(".weight")
            if found and layer in self.layers:
                parts.setdefault(layer, {})[part] = place
        return parts


def read_prequantized(folder: Path) -> Prequantized | None:
    """Return the folder's quantization, or None for plain weights."""
    facts = read_quantization(folder)
    if facts is None:
        return None
    if facts.spec.quantizer == "mlx":
        raise UserError(
            f"{folder} contains weights quantized by MLX, and torch cannot read them.",
            why=f"they are packed in MLX's own format, {facts.spec.bits} bits in groups of {facts.spec.group_size}.",
            do=f"use --backend mlx, or get plain weights: crosstune convert {shlex.quote(str(folder))} --to hf",
        )
    prequantized = Prequantized(folder, facts)
    for spec in {prequantized.spec, *(prequantized.layer_spec(layer) for layer in prequantized.layers)}:
        library = open_quantizer(spec).LIBRARY
        if importlib.util.find_spec(library.partition(".")[0]) is None:
            raise UserError(
                f"{folder} contains weights quantized by {spec.quantizer}.",
                why=f"its library {library} is not installed.",
                do=read_quantizers()[spec.quantizer].install_command,
            )
    return prequantized


def check_requested(prequantized: Prequantized, asked: QuantSpec | None, *, train_type: str) -> None:
    """Raise unless a run requests the quantization of the folder: nothing is quantized twice, or trained if quantized."""
    spec, folder = prequantized.spec, prequantized.folder
    method, library = TRAIN_TYPE_PARTS[train_type]
    if method in ("lora", "dora") and asked is not None and same_quantization(asked, spec):
        return
    matching = "dora" if method == "dora" else "qlora"
    if method in ("lora", "dora") and library in ("auto", spec.quantizer):
        matching = train_type
    flags = f"--train_type {matching} --quantization_backend {spec.quantizer} --n_bits {spec.bits}"
    if spec.has_groups():
        flags += f" --group_size {spec.group_size}"
    if spec.resolved_kind() != dataclasses.replace(spec, kind="auto").resolved_kind():
        flags += f" --quant_type {spec.kind}"
    if not spec.double and spec.has_double():
        flags += " --double_quant false"
    requested = "not quantized" if asked is None else f"{asked.quantizer} with {asked.bits} bits"
    raise UserError(
        f"{folder} contains weights quantized differently than requested ({train_type}, {requested}).",
        why=f"they are {spec.quantizer}, {spec.bits} bits, groups of {spec.group_size}, kind {spec.resolved_kind()}, "
        "and only adapters can be trained on them.",
        do=f"use {flags}, or get plain weights: crosstune convert {shlex.quote(str(folder))} --to none",
    )


def check_plain(folder: Path) -> None:
    """Raise if a folder's weights are quantized in a format that crosstune cannot read."""
    settings = read_config_json(folder).get("quantization_config")
    if not settings:
        return
    bits = next((f" with {n} bits" for n in (8, 4) if settings.get(f"load_in_{n}bit")), "")
    raise UserError(
        f"{folder} contains weights quantized by {settings.get('quant_method', 'another tool')}{bits}.",
        why="crosstune reads plain weights, 4-bit bitsandbytes folders, MXFP4 and folders written by crosstune convert.",
        do="specify the folder or hub id of the model's original weights",
    )


def write_record(
    folder: Path,
    *,
    spec: QuantSpec,
    dtype: torch.dtype,
    layers: Mapping[str, dict[str, Any]],
    original: Mapping[str, Any] | None,
) -> None:
    """Write the file that marks a folder as a quantized model; call it after all tensors are written."""
    write_json(
        folder / RECORD,
        {
            "format": FORMAT,
            "spec": spec.to_json(),
            "dtype": str(dtype).removeprefix("torch."),
            "original": dict(original) if original else None,
            "layers": dict(layers),
        },
    )


def own_config(spec: QuantSpec) -> dict[str, Any]:
    """Return a quantization_config that stops transformers from loading the folder as plain weights."""
    return {"quant_method": OWN_METHOD, "quantizer": spec.quantizer, "bits": spec.bits}
