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
from crosstune.models.adapter_files import canonical_name
from crosstune.torch_engine import export
from crosstune.torch_engine.adapters import split_by_expert
from crosstune.torch_engine.blocks import in_blocks
from crosstune.torch_engine.file_layout import FileLayout, Group
from crosstune.torch_engine.load import empty_model, forms_to_quantize, read_config
from crosstune.torch_engine.prequantized import read_prequantized
from crosstune.torch_engine.quantized import quantize_weight
from crosstune.torch_engine.stream import find_tensors
from crosstune.torch_engine.weight_forms import WeightForm, dense_shape, weight_forms

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
    parameters = settings.get("target_parameters") or ()
    for name, tensor in export.read_adapter_file(folder).items():
        layer, found, part = canonical_name(name, parameters).rpartition(".lora_")
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


def fold(weight: torch.Tensor, matrices: Matrices, *, scale: float, form: WeightForm) -> torch.Tensor:
    """Return the weight with its adapter merged, in fp32."""
    a, b = matrices.a.to(weight.device), matrices.b.to(weight.device)
    if form.stacked:
        a, b = split_by_expert(a, b, num_experts=len(form.matrices))
    delta = b @ a
    merged = weight.float() + scale * (delta.transpose(-1, -2) if form.transposed else delta)
    if matrices.magnitude is None:
        return merged
    ratio = matrices.magnitude.to(weight.device) / torch.linalg.vector_norm(
        merged, dim=0 if form.transposed else 1
    )
    return merged * ratio if form.transposed else ratio[:, None] * merged


class BaseTensors:
    """The tensors of a base folder under the model's names, and the way back to those of the files."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.prequantized = read_prequantized(base.folder)
        self.model = empty_model(base.folder)
        self.places = find_tensors(base.folder) if self.prequantized is None else self.prequantized.dense
        self.layout = FileLayout(self.model, self.places)
        self.forms = weight_forms(self.model)
        self.quantized = forms_to_quantize(self.model, base.spec) if base.spec is not None else {}
        self.held = self.prequantized.forms(self.model) if self.prequantized is not None else {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The dense shape of every tensor."""
        shapes = self.layout.shapes({name: place.shape for name, place in self.places.items()})
        return shapes | {name: dense_shape(self.forms.get(name, form)) for name, form in self.held.items()}

    def read(self, *, on_read: OnBytes | None = None) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
        """Yield the tensors, dense; those quantized in training have their dequantized values, in fp32."""
        total = sum(place.end - place.start for place in self.places.values())
        total, done = total if self.prequantized is None else self.prequantized.num_bytes, 0
        for group, tensors in self.layout.read(self.places, num_workers=2):
            yield group, {name: self._as_trained(name, tensor) for name, tensor in tensors.items()}
            done += sum(self.places[name].end - self.places[name].start for name in group.files)
            if on_read is not None:
                on_read(done, total)
        for number, (name, form) in enumerate(sorted(self.held.items()), start=1):
            yield Group(target=name, files={name: None}), {name: self._dequantize(name, form)}
            if on_read is not None:
                on_read(done + number * (total - done) // len(self.held), total)

    def stored_dtype(self, group: Group) -> torch.dtype:
        """Return the dtype of a group in the files; for quantized weights, their compute dtype."""
        name = next(iter(group.files))
        if name in self.places:
            return self.places[name].dtype
        assert self.prequantized is not None
        return self.prequantized.compute

    def _as_trained(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        base, form = self.base, self.quantized.get(name)
        if base.spec is None or self.held or form is None or in_blocks(name, base.new_blocks):
            return tensor
        matrices = [
            quantize_weight(matrix, base.spec, base.compute).dequantize(base.compute).float().cpu()
            for matrix in form.split(tensor.to(base.device))
        ]
        return form.join(matrices)

    def _dequantize(self, name: str, form: WeightForm) -> torch.Tensor:
        assert self.prequantized is not None
        matrices = [
            self.prequantized.stored(matrix, self.base.device).dequantize(self.base.compute).float().cpu()
            for matrix in form.matrices
        ]
        return self.forms.get(name, form).join(matrices)


def dense_tensors(
    base: BaseTensors,
    adapter: Adapter | None = None,
    *,
    dtype: torch.dtype | None = None,
    on_read: OnBytes | None = None,
) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
    """Yield every tensor of the dense, merged model, under the model's names. `dtype` None keeps the dtype of each
    tensor in the base."""
    layers = adapter.layers if adapter is not None else {}
    if adapter is not None:
        check_layers(base, adapter)
    for group, tensors in base.read(on_read=on_read):
        for name, tensor in tensors.items():
            form = base.forms.get(name)
            matrices = layers.get(name.removesuffix(".weight"))
            if adapter is not None and form is not None and matrices is not None:
                device = base.base.device
                tensor = fold(tensor.to(device), matrices, scale=adapter.scale, form=form).cpu()
            if tensor.is_floating_point():
                tensor = tensor.to(dtype or base.stored_dtype(group))
            tensors[name] = tensor
        yield group, tensors


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
    source = BaseTensors(base)
    tensors = (
        item
        for group, found in dense_tensors(source, adapter, dtype=dtype, on_read=on_read)
        for item in source.layout.revert(group, found).items()
    )
    export.save_model(folder, config, tensors, base=base.folder)


def check_layers(base: BaseTensors, adapter: Adapter) -> None:
    """Check that the base has a weight of matching shape for every layer of the adapter."""
    wrong = []
    for layer, matrices in sorted(adapter.layers.items()):
        form = base.forms.get(f"{layer}.weight") or base.forms.get(layer)
        experts = len(form.matrices) if form is not None and form.stacked else 1
        ranks = {matrices.a.shape[0] % experts, matrices.b.shape[1] % experts}
        shape = (matrices.b.shape[0], matrices.a.shape[1])
        if form is None or form.shape != shape or ranks != {0}:
            held = form.shape if form is not None else base.shapes.get(f"{layer}.weight")
            wrong.append(f"{layer} is {shape} in the adapter and {held} in the base")
    if wrong:
        raise UserError(
            f"The adapter {adapter.folder} does not fit the base {base.base.folder}.",
            why=f"{len(wrong)} of {len(adapter.layers)} layers differ: {wrong[0]}.",
            do="name the base it was trained on with --base",
        )
