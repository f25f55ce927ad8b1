"""Folders whose weights are quantized already: read tensor by tensor, and written."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from crosstune.config.train_types import TRAIN_TYPE_PARTS
from crosstune.core.errors import UserError
from crosstune.core.record import write_json
from crosstune.models.folder import read_config
from crosstune.models.quantized_folder import (
    FORMAT,
    OWN_METHOD,
    RECORD,
    FolderQuantization,
    read_quantization,
)
from crosstune.torch_engine.quantized import QuantSpec, StoredWeight, open_quantizer
from crosstune.torch_engine.stored_state import describe, restore
from crosstune.torch_engine.stream import Place, find_tensors, read_tensor

_USUAL_KINDS = {("bnb", 4): "nf4"}


@dataclass(frozen=True)
class Prequantized:
    folder: Path
    facts: FolderQuantization

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(**self.facts.spec)

    @property
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
        """The tensors that are not part of a quantized weight."""
        return {name: place for name, place in self.places.items() if self._layer_of(name) is None}

    @property
    def num_bytes(self) -> int:
        return sum(place.end - place.start for place in self.places.values())

    def shape(self, layer: str) -> tuple[int, int]:
        rows, columns = self.facts.layers[layer]["shape"]
        return rows, columns

    def stored(self, layer: str, device: torch.device) -> StoredWeight:
        prefix = f"{layer}.weight."
        tensors = {
            name.removeprefix(prefix): read_tensor(self.places[name]).to(device)
            for name in self._parts[layer]
            if name.startswith(prefix) and ".quant_state." not in name
        }
        facts = self.facts.layers[layer]
        if self.facts.own:
            return restore(facts, tensors)
        packed = read_tensor(self.places[f"{layer}.weight"]).to(device)
        return restore({**facts, "kind": "FourBit"}, {**tensors, "packed": packed})

    @cached_property
    def _parts(self) -> dict[str, list[str]]:
        parts: dict[str, list[str]] = {layer: [] for layer in self.facts.layers}
        for name in self.places:
            layer = self._layer_of(name)
            if layer is not None:
                parts[layer].append(name)
        return parts

    def _layer_of(self, name: str) -> str | None:
        layer, found, _ = name.partition(".weight")
        return layer if found and layer in self.facts.layers else None


def read_prequantized(folder: Path) -> Prequantized | None:
    """None for a folder of plain weights."""
    facts = read_quantization(folder)
    if facts is None:
        return None
    if facts.spec["quantizer"] == "mlx":
        raise UserError(
            f"{folder} holds weights quantized by MLX, which torch cannot read.",
            why=f"they are packed in MLX's own way, {facts.spec['bits']} bits in groups of {facts.spec['group_size']}.",
            do=f"use --backend mlx, or get plain weights: crosstune convert {folder} --to hf",
        )
    held = Prequantized(folder, facts)
    library = open_quantizer(held.spec).LIBRARY
    if importlib.util.find_spec(library.partition(".")[0]) is None:
        name = held.spec.quantizer
        raise UserError(
            f"{folder} holds weights quantized by {name}.",
            why=f"its library {library} is not installed.",
            do=f"pip install 'crosstune[{name}]'",
        )
    return held


def check_asked(held: Prequantized, asked: QuantSpec | None, *, train_type: str) -> None:
    """Raise unless a run asks for exactly the quantization that the folder holds: nothing is quantized twice."""
    spec = held.spec
    method, library = TRAIN_TYPE_PARTS[train_type]
    fitting = train_type if library in ("auto", spec.quantizer) else {"dora": "dora"}.get(method, "qlora")
    flags = f"--quantization_backend {spec.quantizer} --n_bits {spec.bits}"
    if _group_matters(spec):
        flags += f" --group_size {spec.group_size}"
    if _kind(spec) != _kind(dataclasses.replace(spec, kind="auto")):
        flags += f" --quant_type {spec.kind}"
    if not spec.double and (spec.quantizer, spec.bits) == ("bnb", 4):
        flags += " --double_quant false"
    if method not in ("lora", "dora"):
        raise UserError(
            f"{held.folder} holds {spec.quantizer} weights of {spec.bits} bits, which {method} cannot train.",
            why="quantized weights stay as they are.",
            do=f"use --train_type qlora {flags}, or get plain weights: crosstune convert {held.folder} --to none",
        )
    if asked is None or _meaning(asked) != _meaning(spec):
        have = (
            "a base that is not quantized" if asked is None else f"{asked.quantizer} with {asked.bits} bits"
        )
        raise UserError(
            f"{held.folder} holds weights quantized otherwise than asked ({have}).",
            why=f"they are {spec.quantizer}, {spec.bits} bits, groups of {spec.group_size}, kind {_kind(spec)}.",
            do=f"use --train_type {fitting} {flags}, or crosstune convert the folder",
        )


def check_plain(folder: Path) -> None:
    """Raise when a folder says that its weights are quantized in a way that is not read here."""
    settings = read_config(folder).get("quantization_config")
    if not settings:
        return
    bits = next((f" with {n} bits" for n in (8, 4) if settings.get(f"load_in_{n}bit")), "")
    raise UserError(
        f"{folder} holds weights quantized by {settings.get('quant_method', 'another tool')}{bits}.",
        why="crosstune quantizes plain weights, and reads bitsandbytes' 4 bits and what crosstune convert has written.",
        do="name the folder or hub id of the model's original weights",
    )


def write_record(
    folder: Path,
    *,
    spec: QuantSpec,
    dtype: torch.dtype,
    layers: Mapping[str, dict[str, Any]],
    original: Mapping[str, Any] | None,
) -> None:
    """What makes a folder of tensors a quantized model; written when the tensors are all there."""
    write_json(
        folder / RECORD,
        {
            "format": FORMAT,
            "spec": dataclasses.asdict(spec),
            "dtype": str(dtype).removeprefix("torch."),
            "original": dict(original) if original else None,
            "layers": dict(layers),
        },
    )


def own_config(spec: QuantSpec) -> dict[str, Any]:
    """For config.json: keeps transformers from reading the folder as plain weights."""
    return {"quant_method": OWN_METHOD, "quantizer": spec.quantizer, "bits": spec.bits}


def pieces(weight: StoredWeight) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A stored weight as tensors of their own memory, and the rest as JSON."""
    return {name: tensor.detach().clone() for name, tensor in weight.tensors().items()}, describe(weight)


def _meaning(spec: QuantSpec) -> tuple[Any, ...]:
    """What of a specification changes the numbers."""
    group = spec.group_size if _group_matters(spec) else None
    double = spec.double if (spec.quantizer, spec.bits) == ("bnb", 4) else None
    return spec.quantizer, spec.bits, _kind(spec), group, double


def _kind(spec: QuantSpec) -> str:
    return _USUAL_KINDS.get((spec.quantizer, spec.bits), "int") if spec.kind == "auto" else spec.kind


def _group_matters(spec: QuantSpec) -> bool:
    return spec.bits < 8 or spec.quantizer == "hqq"
