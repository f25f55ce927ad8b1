"""Merge an adapter into a base model tensor by tensor, with one shard of the result in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from crosstune.core.errors import UserError
from crosstune.core.model_folders import AdapterFolder, DenseWeights, OnBytes
from crosstune.models.adapter_files import read_matrices, without_tied
from crosstune.torch_engine.device import PRECISIONS
from crosstune.torch_engine.experts import split_by_expert
from crosstune.torch_engine.loading.adapters import tied_parameters
from crosstune.torch_engine.loading.blocks import in_blocks
from crosstune.torch_engine.loading.file_layout import FileLayout, Group
from crosstune.torch_engine.loading.load import empty_model, forms_to_quantize, read_config
from crosstune.torch_engine.loading.prequantized import read_prequantized
from crosstune.torch_engine.loading.stream import find_tensors
from crosstune.torch_engine.loading.weight_forms import WeightForm, dense_shape, weight_forms
from crosstune.torch_engine.quantized import StoredWeight, quantize_weight
from crosstune.torch_engine.results import export

CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


Matrices = Mapping[str, torch.Tensor]
"""The adapter of a layer: A, B and, for DoRA, magnitude_vector."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    folder: Path
    scale: float
    layers: Mapping[str, Matrices]
    saved: Mapping[str, torch.Tensor]
    """The parameters trained in full."""


def read_adapter(source: AdapterFolder, base: BaseTensors) -> Adapter:
    """Read the tensors of an adapter for a base, in fp32."""
    folder, settings = source.path, source.settings
    parts: dict[str, dict[str, torch.Tensor]] = {}
    arrays = without_tied(folder, read_matrices(folder, settings), settings, tied=tied_parameters(base.model))
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    saved = {name: tensors.pop(name) for name in list(tensors) if ".lora_" not in name}
    for name, matrix in tensors.items():
        layer, _, part = name.rpartition(".lora_")
        parts.setdefault(layer, {})[part.removesuffix(".weight")] = matrix
    for layer, matrices in parts.items():
        if not {"A", "B"} <= matrices.keys() <= {"A", "B", "magnitude_vector"}:
            raise UserError(
                f"The adapter {folder} contains unsupported tensors.",
                why=f"a LoRA or DoRA layer needs A and B, got {', '.join(sorted(matrices))} for '{layer}'.",
            )
    root = settings["r"] ** 0.5 if settings.get("use_rslora") else settings["r"]
    return Adapter(folder=folder, scale=settings["lora_alpha"] / root, layers=parts, saved=saved)


def fold(weight: torch.Tensor, matrices: Matrices, *, scale: float, form: WeightForm) -> torch.Tensor:
    """Return the weight with its adapter merged, in fp32."""
    a, b = matrices["A"].to(weight.device), matrices["B"].to(weight.device)
    if form.stacked:
        a, b = split_by_expert(a, b, num_experts=len(form.matrices))
    delta = b @ a
    merged = weight.float() + scale * (delta.transpose(-1, -2) if form.transposed else delta)
    if "magnitude_vector" not in matrices:
        return merged
    lengths = torch.linalg.vector_norm(merged, dim=0 if form.transposed else 1)
    ratio = matrices["magnitude_vector"].to(weight.device) / lengths
    return merged * ratio if form.transposed else ratio[:, None] * merged


class BaseTensors:
    """The dense tensors of a base folder under the model's names; `layout.revert` restores the layout of the files."""

    def __init__(self, weights: DenseWeights, device: torch.device = CPU) -> None:
        folder, spec = weights.folder, weights.quantization
        self.weights, self.device = weights, device
        trained = PRECISIONS[weights.precision if spec is not None else "fp32"]
        self.compute = trained.autocast or trained.weights
        self.prequantized = read_prequantized(folder)
        self.model = empty_model(folder)
        self.places = find_tensors(folder) if self.prequantized is None else self.prequantized.dense
        self.layout = FileLayout(self.model, self.places)
        self.forms = weight_forms(self.model)
        self.quantized = forms_to_quantize(self.model, spec) if spec is not None else {}
        self.held = self.prequantized.forms(self.model) if self.prequantized is not None else {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The dense shape of every tensor."""
        shapes = self.layout.shapes({name: place.shape for name, place in self.places.items()})
        return shapes | {name: dense_shape(self.forms.get(name, form)) for name, form in self.held.items()}

    def read(self, *, on_read: OnBytes | None = None) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
        """Yield the dense tensors. A tensor that was quantized in training has its dequantized values, in fp32."""
        places = self.places if self.prequantized is None else self.prequantized.places
        total, done = sum(place.end - place.start for place in places.values()), 0
        for group, tensors in self.layout.read(self.places, num_workers=2):
            yield group, {name: self._as_trained(name, tensor) for name, tensor in tensors.items()}
            done += sum(self.places[name].end - self.places[name].start for name in group.files)
            if on_read is not None:
                on_read(done, total)
        for number, (name, form) in enumerate(sorted(self.held.items()), start=1):
            assert self.prequantized is not None
            stored = (self.prequantized.stored(matrix, self.device) for matrix in form.matrices)
            dense = self._join(self.forms.get(name, form), stored)
            yield Group(target=name, files={name: None}), {name: dense}
            if on_read is not None:
                on_read(done + number * (total - done) // len(self.held), total)

    def stored_dtype(self, group: Group) -> torch.dtype:
        """Return the dtype of a group in the files; the compute dtype if it is quantized."""
        name = next(iter(group.files))
        if name in self.places:
            return self.places[name].dtype
        assert self.prequantized is not None
        return self.prequantized.compute

    def _as_trained(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        spec, form = self.weights.quantization, self.quantized.get(name)
        if spec is None or self.held or form is None or in_blocks(name, self.weights.new_blocks):
            return tensor
        matrices = form.split(tensor.to(self.device))
        return self._join(form, (quantize_weight(matrix, spec, self.compute) for matrix in matrices))

    def _join(self, form: WeightForm, stored: Iterable[StoredWeight]) -> torch.Tensor:
        return form.join([weight.dequantize(self.compute).float().cpu() for weight in stored])


def dense_tensors(
    base: BaseTensors, *, on_read: OnBytes | None = None
) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
    """Yield every tensor of the dense, merged model under the model's names."""
    adapter, dtype = None, DTYPES.get(base.weights.dtype)
    if base.weights.adapter is not None:
        adapter = read_adapter(base.weights.adapter, base)
        check_layers(base, adapter)
    for group, tensors in base.read(on_read=on_read):
        for name, tensor in tensors.items():
            form = base.forms.get(name)
            matrices = adapter.layers.get(name.removesuffix(".weight")) if adapter is not None else None
            if adapter is not None and form is not None and matrices is not None:
                tensor = fold(tensor.to(base.device), matrices, scale=adapter.scale, form=form).cpu()
            if adapter is not None:
                tensor = adapter.saved.get(name, tensor)
            if tensor.is_floating_point():
                tensor = tensor.to(dtype or base.stored_dtype(group))
            tensors[name] = tensor
        yield group, tensors


def write_dense(
    folder: Path, weights: DenseWeights, *, device: torch.device = CPU, on_read: OnBytes | None = None
) -> None:
    """Write a dense, sharded model folder for transformers, with the adapter merged."""
    config = read_config(weights.folder)
    if weights.dtype in DTYPES:
        config.dtype = DTYPES[weights.dtype]
    source = BaseTensors(weights, device)
    tensors = (
        item
        for group, found in dense_tensors(source, on_read=on_read)
        for item in source.layout.revert(group, found).items()
    )
    export.save_model(folder, config, tensors, base=weights.folder)


def check_layers(base: BaseTensors, adapter: Adapter) -> None:
    """Check that the base has a weight of matching shape for every layer of the adapter."""
    wrong = [
        f"{name} is {tuple(tensor.shape)} in the adapter and {base.shapes.get(name)} in the base"
        for name, tensor in adapter.saved.items()
        if base.shapes.get(name) != tuple(tensor.shape)
    ]
    for layer, matrices in sorted(adapter.layers.items()):
        form = base.forms.get(f"{layer}.weight") or base.forms.get(layer)
        experts = len(form.matrices) if form is not None and form.stacked else 1
        a, b = matrices["A"], matrices["B"]
        ranks, shape = {a.shape[0] % experts, b.shape[1] % experts}, (b.shape[0], a.shape[1])
        if form is None or form.shape != shape or ranks != {0}:
            held = form.shape if form is not None else base.shapes.get(f"{layer}.weight")
            wrong.append(f"{layer} is {shape} in the adapter and {held} in the base")
    if wrong:
        raise UserError(
            f"The adapter {adapter.folder} does not match the base {base.weights.folder}.",
            why=f"{len(wrong)} of {len(adapter.layers) + len(adapter.saved)} layers differ: {wrong[0]}.",
            do="specify the base it was trained on with --base",
        )
