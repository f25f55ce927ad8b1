"""Merge an adapter into a base model tensor by tensor, holding one shard of the result in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from crosstune.core.errors import UserError
from crosstune.core.model_folders import OnBytes
from crosstune.core.quantization import QuantSpec
from crosstune.models.adapter_files import PEFT_PREFIX
from crosstune.torch_engine import export
from crosstune.torch_engine.blocks import in_blocks
from crosstune.torch_engine.load import quantizable_layers, read_config
from crosstune.torch_engine.prequantized import Prequantized, read_prequantized
from crosstune.torch_engine.quantized import quantize_weight
from crosstune.torch_engine.stream import Place, find_tensors, read_ahead

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Matrices:
    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class Adapter:
    folder: Path
    scale: float
    layers: Mapping[str, Matrices]


@dataclass(frozen=True, kw_only=True)
class Base:
    """Weights to merge into. With `spec`, each weight is quantized and dequantized, as in training."""

    folder: Path
    spec: QuantSpec | None = None
    compute: torch.dtype = torch.float32
    """Dtype of dequantized weights in training."""
    new_blocks: frozenset[int] = frozenset()
    """Blocks added by training, which were never quantized."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def read_adapter(folder: Path, settings: Mapping[str, Any]) -> Adapter:
    """Read the matrices of a PEFT adapter folder in fp32; `settings` is its adapter_config.json."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in export.read_adapter_file(folder).items():
        layer, found, part = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
        if not found:
            raise UserError(
                f"The adapter {folder} holds {name}.", why="that is not part of a LoRA or DoRA layer."
            )
        parts.setdefault(layer, {})[part.removesuffix(".weight")] = tensor.float()
    for layer, tensors in parts.items():
        if not {"A", "B"} <= tensors.keys() <= {"A", "B", "magnitude_vector"}:
            raise UserError(
                f"The adapter {folder} has {', '.join(sorted(tensors))} for {layer}.", why="it needs A and B."
            )
    root = settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"]
    return Adapter(
        folder=folder,
        scale=settings["lora_alpha"] / root,
        layers={
            layer: Matrices(a=tensors["A"], b=tensors["B"], magnitude=tensors.get("magnitude_vector"))
            for layer, tensors in parts.items()
        },
    )


def fold(weight: torch.Tensor, matrices: Matrices, *, scale: float) -> torch.Tensor:
    """Return the weight with its adapter merged, in fp32."""
    merged = weight.float() + scale * (matrices.b @ matrices.a).to(weight.device)
    if matrices.magnitude is None:
        return merged
    ratio = matrices.magnitude.to(weight.device) / torch.linalg.vector_norm(merged, dim=1)
    return ratio[:, None] * merged


def base_tensors(base: Base, *, on_read: OnBytes | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the base's tensors, dense; those quantized in training have their dequantized values, in fp32."""
    prequantized = read_prequantized(base.folder)
    if prequantized is not None:
        yield from _dequantized(prequantized, base, on_read)
        return
    places = find_tensors(base.folder)
    quantized = quantizable_layers(base.folder) if base.spec is not None else set()
    for name, tensor in _read_all(places, on_read):
        layer = name.removesuffix(".weight")
        if (
            base.spec is not None
            and layer in quantized
            and name.endswith(".weight")
            and not in_blocks(name, base.new_blocks)
        ):
            stored = quantize_weight(tensor.to(base.device), base.spec, base.compute)
            yield name, stored.dequantize(base.compute).float().cpu()
        else:
            yield name, tensor


def dense_tensors(
    base: Base,
    adapter: Adapter | None = None,
    *,
    dtype: torch.dtype | None = None,
    on_read: OnBytes | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of the dense, merged model. `dtype` None keeps the dtype of each tensor in the base."""
    layers = adapter.layers if adapter is not None else {}
    if adapter is not None:
        check_layers(base.folder, adapter)
    kept = stored_dtypes(base.folder)
    for name, tensor in base_tensors(base, on_read=on_read):
        matrices = layers.get(name.removesuffix(".weight"))
        if adapter is not None and matrices is not None and name.endswith(".weight"):
            tensor = fold(tensor.to(base.device), matrices, scale=adapter.scale).cpu()
        yield name, tensor.to(dtype or kept[name]) if tensor.is_floating_point() else tensor


def write_dense(
    folder: Path,
    base: Base,
    adapter: Adapter | None = None,
    *,
    dtype: torch.dtype | None = None,
    on_read: OnBytes | None = None,
) -> None:
    """Write a dense, sharded model folder for transformers, with the adapter merged."""
    config = read_config(base.folder)
    if dtype is not None:
        config.dtype = dtype
    tensors = dense_tensors(base, adapter, dtype=dtype, on_read=on_read)
    export.save_model(folder, config, tensors, base=base.folder)


def check_layers(base: Path, adapter: Adapter) -> None:
    """Check that the base has a weight of matching shape for every layer of the adapter."""
    shapes = weight_shapes(base)
    wrong = [
        f"{layer} is {(matrices.b.shape[0], matrices.a.shape[1])} in the adapter and {shapes.get(layer + '.weight')} in the base"
        for layer, matrices in sorted(adapter.layers.items())
        if shapes.get(layer + ".weight") != (matrices.b.shape[0], matrices.a.shape[1])
    ]
    if wrong:
        raise UserError(
            f"The adapter {adapter.folder} does not fit the base {base}.",
            why=f"{len(wrong)} of {len(adapter.layers)} layers differ: {wrong[0]}.",
            do="name the base it was trained on with --base",
        )


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the dense shape of every weight of a folder."""
    prequantized = read_prequantized(folder)
    places = find_tensors(folder) if prequantized is None else prequantized.dense
    shapes = {name: place.shape for name, place in places.items()}
    return shapes | (
        {f"{layer}.weight": prequantized.shape(layer) for layer in prequantized.layers}
        if prequantized
        else {}
    )


def stored_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor of a folder; for a quantized weight, its compute dtype."""
    prequantized = read_prequantized(folder)
    if prequantized is None:
        return {name: place.dtype for name, place in find_tensors(folder).items()}
    kept = {name: place.dtype for name, place in prequantized.dense.items()}
    return kept | {f"{layer}.weight": prequantized.compute for layer in prequantized.layers}


def _dequantized(
    prequantized: Prequantized, base: Base, on_read: OnBytes | None
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _read_all(prequantized.dense, None)
    for number, layer in enumerate(sorted(prequantized.layers), start=1):
        yield (
            f"{layer}.weight",
            prequantized.stored(layer, base.device).dequantize(base.compute).float().cpu(),
        )
        if on_read is not None:
            on_read(number * prequantized.num_bytes // len(prequantized.layers), prequantized.num_bytes)


def _read_all(places: dict[str, Place], on_read: OnBytes | None) -> Iterator[tuple[str, torch.Tensor]]:
    total, done = sum(place.end - place.start for place in places.values()), 0
    for name, tensor in read_ahead(sorted(places), places, num_workers=2):
        yield name, tensor
        done += places[name].end - places[name].start
        if on_read is not None:
            on_read(done, total)
