"""LoRA on the experts of a mixture, in the layout of the torch engine and PEFT, whatever layout mlx-lm has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from crosstune.core.names import natural_key
from crosstune.core.weights import uniform_by_name
from crosstune.models.adapter_choice import AdapterSettings

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A stack of the torch engine -> its layers in mlx-lm."""
_INTERLEAVED = ("gpt_oss",)
"""Models with transposed matrices in their files, whose gate and up projections alternate. In others the gate comes first."""
_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward")
_NAMES_IN_FILES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class Adapter(nn.Module):
    """An adapter with dropout on its inputs."""

    base: Any
    start: Any = None
    """The initial A and B if they were subtracted from the base."""

    def __init__(self, settings: AdapterSettings) -> None:
        super().__init__()
        self._scale = settings.scale
        self._dropout = settings.dropout
        self._stream: list[mx.array] = []

    @property
    def drops(self) -> bool:
        return self._dropout > 0

    def set_stream(self, key: mx.array | None) -> None:
        """Set the random key of dropout, the same when the backward pass recomputes a layer; None turns dropout off."""
        self._stream = [key] if key is not None else []

    def drop(self, x: mx.array) -> mx.array:
        if not self._stream:
            return x
        kept = mx.random.bernoulli(1 - self._dropout, x.shape, key=self._stream[0])
        return x * kept.astype(x.dtype) * (1 / (1 - self._dropout))


@dataclass(frozen=True)
class ExpertWeight:
    """The experts that a tensor of a model's files has: `path` names mlx-lm's layer, None for gate and up in one."""

    path: str | None
    expert: int | None
    """None: all experts."""
    transposed: bool = False


class ExpertAdapter(Adapter):
    """An A and a B for each expert of a stack: W + scale * B A, stored in fp32 and cast to the dtype of the layer.

    The rows of A are grouped by expert, the columns of B alternate between the experts. mlx-lm has gate and up apart: they
    share A, and B has the rows of both.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        *,
        name: str,
        settings: AdapterSettings,
        seed: int,
        interleaved: bool,
    ) -> None:
        super().__init__(settings)
        self.layers = MappingProxyType(dict(layers))  # a dict would be a child of this module
        self.num_experts, self.num_rows, columns = stack_shape(next(iter(layers.values())))
        self._interleaved, height = interleaved, settings.rank * self.num_experts
        self.lora_A = mx.array(uniform_by_name(name, shape=(height, columns), seed=seed))
        self.lora_B = mx.zeros((self.num_rows * len(layers), height))

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Compute the stack's only layer, in whose place the adapter is."""
        [path] = self.layers
        out = self.base(x, indices, sorted_indices=sorted_indices)
        return self.add(path, out, x, indices, sorted_indices)

    def add(self, path: str, out: mx.array, x: mx.array, indices: mx.array, is_sorted: bool) -> mx.array:
        """Add the adapter's part to the output of one of its layers."""
        a, b = self._factors(path)
        product = partial(mx.gather_mm, rhs_indices=indices, sorted_indices=is_sorted)
        low = product(self.drop(x).astype(out.dtype), a.astype(out.dtype).swapaxes(-1, -2))
        return out + product(low, (b * self._scale).astype(out.dtype).swapaxes(-1, -2))

    def original(self) -> ExpertAdapter:
        """Return the adapter with its layers, whose weights it leaves as they are."""
        return self

    def rows_of(self, path: str | None) -> slice:
        """Return the rows of a layer in the stack."""
        if path is None:
            return slice(None)
        place = list(self.layers).index(path)
        if self._interleaved:
            return slice(place, None, len(self.layers))
        return slice(place * self.num_rows, (place + 1) * self.num_rows)

    def change(self, weight: ExpertWeight) -> mx.array:
        """Return what the adapter adds to a tensor of the model's files, in fp32."""
        a, b = self._factors(weight.path)
        change = self._scale * (b @ a if weight.expert is None else b[weight.expert] @ a[weight.expert])
        return change.swapaxes(-1, -2) if weight.transposed else change

    def weights_in(self, name: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, ExpertWeight]:
        """Return the tensors of a model's files that this stack consists of; none if they are stored in another way.

        `shapes` are those of all tensors in the files.
        """
        layer = name.rpartition(".experts.")[0].rpartition(".")[0]
        fused = (self.num_experts, self.num_rows * len(self.layers), self.lora_A.shape[1])
        if name in shapes and tuple(shapes[name]) in (fused, (fused[0], fused[2], fused[1])):
            transposed = tuple(shapes[name]) != fused or self._interleaved
            return {name: ExpertWeight(None, None, transposed)}
        found: dict[str, ExpertWeight] = {}
        for path in self.layers:
            if f"{path}.weight" in shapes:  # a folder in mlx-lm's layout
                found[f"{path}.weight"] = ExpertWeight(path, None)
                continue
            part = path.rpartition(".")[2]
            for expert in range(self.num_experts):
                names = [
                    f"{layer}.{block}.experts.{expert}.{word}.weight"
                    for block in _BLOCKS
                    for word in (part, _NAMES_IN_FILES[part])
                ]
                stored = next((each for each in names if each in shapes), None)
                if stored is None:
                    return {}
                found[stored] = ExpertWeight(path, expert)
        return found

    def _factors(self, path: str | None) -> tuple[mx.array, mx.array]:
        """Return A as experts x rank x inputs and B as experts x outputs x rank."""
        rows = self.lora_B[self.rows_of(path)]
        b = rows.reshape(rows.shape[0], -1, self.num_experts).transpose(2, 0, 1)
        return self.lora_A.reshape(self.num_experts, -1, self.lora_A.shape[1]), b


class _AdaptedExperts(nn.Module):
    """A layer of experts, and a function that adds an adapter with a place of its own in the model."""

    def __init__(self, base: nn.Module, add: Callable[..., mx.array]) -> None:
        super().__init__()
        self.base, self._add = base, add

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        out = self.base(x, indices, sorted_indices=sorted_indices)
        return self._add(out, x, indices, sorted_indices)


def adapt_experts(
    model: nn.Module, name: str, paths: Sequence[str], *, settings: AdapterSettings, seed: int
) -> ExpertAdapter:
    """Add an adapter to the layers of a stack. In the model it has the stack's canonical name, as on torch."""
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in paths}
    interleaved = getattr(model, "model_type", "") in _INTERLEAVED
    adapter = ExpertAdapter(layers, name=name, settings=settings, seed=seed, interleaved=interleaved)
    if name in layers:
        adapter.base = layers[name]
        model.update_modules(tree_unflatten([(name, adapter)]))
        return adapter
    replaced = [(path, _AdaptedExperts(base, partial(adapter.add, path))) for path, base in layers.items()]
    model.update_modules(tree_unflatten(replaced))
    place: Any = model
    *outer, last = name.split(".")
    for part in outer:
        if isinstance(place, list):
            place = place[int(part)]
            continue
        if part not in place:
            setattr(place, part, nn.Module())
        place = place[part]
    setattr(place, last, adapter)
    return adapter


def expert_stacks(model: nn.Module) -> dict[str, list[str]]:
    """Return the stacks of experts that can be adapted, by canonical name, with their layers in mlx-lm."""
    found: dict[str, list[str]] = {}
    for path in expert_layers(model):
        found.setdefault(stack_of(path), []).append(path)
    return {
        name: paths
        for name, paths in found.items()
        if _PARTS.get(name.rpartition(".")[2]) == tuple(path.rpartition(".")[2] for path in paths)
    }


def stack_of(path: str) -> str:
    """Return the torch engine's name for the weights of a layer of experts."""
    module, _, part = path.rpartition(".")
    parent = module.rpartition(".")[0].replace(".block_sparse_moe", ".mlp")
    return f"{parent}.experts.{'gate_up_proj' if part in ('gate_proj', 'up_proj') else part}"


def expert_layers(model: nn.Module) -> list[str]:
    """Return the names of layers with the stacked weights of several experts."""
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    kinds = (SwitchLinear, QuantizedSwitchLinear)
    found = (name for name, module in model.named_modules() if isinstance(module, kinds))
    return sorted((name.removesuffix(".base") for name in found), key=natural_key)


def stack_shape(layer: Any) -> tuple[int, int, int]:
    """Return the number of experts, and the rows and columns of each matrix."""
    experts, rows, columns = layer.weight.shape
    return experts, rows, columns * 32 // layer.bits if "scales" in layer else columns
