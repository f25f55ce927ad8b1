"""Replace the linear layers of a model in memory by quantized layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.compat.quantization_config import dtype_name
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec, read_spec
from crosstune.torch_engine.quant.hqq import SCALES_IN_A_GROUP, shrink
from crosstune.torch_engine.quantized import QuantLinear, StoredWeight, open_quantizer

HALVES = (torch.float16, torch.bfloat16)

Choose = Callable[[str], "LayerStorage | None"]
"""Maps a layer's name to its storage recipe; None leaves the layer unchanged."""


@dataclass(frozen=True, kw_only=True)
class LayerStorage:
    """The storage of one layer: everything that determines its values."""

    spec: QuantSpec | None = None
    """None stores 16 bits."""
    compute: torch.dtype | None = None
    """The dtype to compute in; None: the dtype of the input."""
    kept_in: torch.dtype | None = None
    """The 16-bit dtype of a layer that is not quantized."""
    small_zeros: bool = False
    small_scales: bool = False
    """HQQ: quantize zero points and scales to 8 bits."""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "spec": None if self.spec is None else self.spec.to_json(),
            "compute": dtype_name(self.compute),
            "kept_in": dtype_name(self.kept_in),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LayerStorage:
        dtypes = {name: read_dtype(data[name]) for name in ("compute", "kept_in")}
        return cls(**{**data, **dtypes, "spec": read_spec(data["spec"])})


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of layers of exactly class nn.Linear; nn.MultiheadAttention never calls its subclass."""
    modules = model.named_modules(remove_duplicate=False)
    return [name for name, module in modules if name and type(module) is nn.Linear]


def replace_layers(model: nn.Module, choose: Choose) -> tuple[list[str], list[str]]:
    """Replace the chosen layers in place; return their names, and the layers skipped because an embedding shares their
    weight. All layers are checked before the first is replaced."""
    recipes = {name: recipe for name in linear_names(model) if (recipe := choose(name)) is not None}
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    shared = [name for name in recipes if id(model.get_submodule(name).weight) in embedded]
    for name in shared:
        del recipes[name]
    for name, recipe in recipes.items():
        _check_layer(name, model.get_submodule(name), recipe)
    names_of: dict[int, list[str]] = {}
    for name in recipes:
        names_of.setdefault(id(model.get_submodule(name)), []).append(name)
    for names in names_of.values():
        layer = model.get_submodule(names[0])
        assert isinstance(layer, nn.Linear)
        new = make_layer(layer, recipes[names[0]])
        for name in names:
            put_module(model, name, new)
    return list(recipes), shared


def freeze_base(model: nn.Module, *, checkpointing: bool) -> None:
    """Freeze the model's weights, so that adapters can be trained on top of them."""
    model.requires_grad_(False)
    if checkpointing:
        enable = getattr(model, "gradient_checkpointing_enable", None)
        if enable is None:
            raise UserError(
                f"{type(model).__name__} cannot recompute its activations.",
                why="only models of transformers support gradient checkpointing.",
                do="remove use_gradient_checkpointing",
            )
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def check_storage(recipe: LayerStorage, shape: tuple[int, int]) -> None:
    """Check that a layer of this shape can be stored this way."""
    if recipe.spec is None:
        return
    open_quantizer(recipe.spec).check(recipe.spec, shape)
    num_scales = shape[0] * shape[1] // recipe.spec.group_size
    if recipe.small_scales and num_scales % SCALES_IN_A_GROUP:
        raise UserError(
            f"The {num_scales} scales of a layer of {shape[0]} x {shape[1]} cannot be quantized.",
            why=f"HQQ quantizes them in groups of {SCALES_IN_A_GROUP}.",
            do="remove quant_scale, or choose a smaller group size",
        )


def make_stored(weight: torch.Tensor, recipe: LayerStorage, *, dtype: torch.dtype) -> StoredWeight:
    """Quantize a weight; `dtype` is the dtype of the scales, unless the library chooses one."""
    assert recipe.spec is not None
    tensors, facts = open_quantizer(recipe.spec).quantize(weight.detach(), recipe.spec, dtype)
    names = [*["zero"] * recipe.small_zeros, *["scale"] * recipe.small_scales]
    if names:
        tensors, facts = shrink(tensors, facts, names)
    return StoredWeight(recipe.spec.quantizer, tensors, facts)


def read_dtype(name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"'{name}' is not a dtype of torch.")
    return dtype


class DenseView(torch.Tensor):
    """A dequantized copy of a weight. Operations on it give plain tensors; changing it raises.

    PEFT merges adapters by assigning to `weight.data`, and the merged weight would be lost with the copy.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if args and isinstance(args[0], cls) and _changes(func):
            raise UserError(
                "A quantized weight cannot be changed in place, as PEFT does to merge an adapter.",
                why="the layer stores packed bits, and PEFT reads a copy.",
                do="save the adapter and merge it with: crosstune merge; or replace the weight with the layer's "
                "quantize_weights",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _changes(func: Any) -> bool:
    """True if a function of torch.Tensor changes its first argument: x.data = y, x += y, x[0] = y, x.add_(y)."""
    name = getattr(func, "__name__", "")
    if func == torch.Tensor.data.__set__ or name == "__setitem__":
        return True
    if name.startswith("__"):
        return name.startswith("__i") and hasattr(torch.Tensor, f"__{name[3:]}")
    return name.endswith("_") and name != "requires_grad_"


class QuantizedLinear(QuantLinear, nn.Linear):
    """A quantized layer with its recipe, so that it can requantize new weights, change device and be saved.

    It is an nn.Linear because PEFT selects layers by their type.
    """

    def __init__(
        self, stored: StoredWeight, bias: torch.Tensor | None, *, recipe: LayerStorage, dtype: torch.dtype
    ) -> None:
        """`dtype` is the dtype of the weight before quantization."""
        super().__init__(stored, None if bias is None else bias.detach().clone())
        self.recipe, self.dense_dtype = recipe, dtype

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, bias: torch.Tensor | None, recipe: LayerStorage
    ) -> QuantizedLinear:
        check_storage(recipe, (weight.shape[0], weight.shape[1]))
        stored = make_stored(weight, recipe, dtype=recipe.compute or weight.dtype)
        return cls(stored, bias, recipe=recipe, dtype=weight.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """The weight dequantized at each access, for code in torch and PEFT that reads a layer's weight directly."""
        return self.stored.dequantize(self.dense_dtype).as_subclass(DenseView)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recipe.compute is None or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return super().forward(x.to(self.recipe.compute)).to(x.dtype)

    def quantize_weights(self, weight: torch.Tensor) -> None:
        """Quantize a weight of the same shape and replace the layer's weight with it."""
        _check_shape(weight, self.stored.shape)
        self.stored = make_stored(weight, self.recipe, dtype=self.recipe.compute or self.dense_dtype)

    def dequantize_weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.stored.dequantize(dtype or self.dense_dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> QuantizedLinear:
        """Follow the model to a different device or dtype; a change of dtype does not change the stored weight."""
        tried = fn(torch.empty(0, dtype=self.dense_dtype, device=self.stored.packed.device))
        if tried.device.type == "meta":
            raise UserError(
                "A quantized layer cannot be moved to the meta device.", why="it would lose its weight."
            )
        super()._apply(fn, recurse)
        self.dense_dtype = tried.dtype
        return self


class HalfLinear(nn.Linear):
    """A linear layer that is stored in 16 bits and computes in the dtype of its input."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, recipe: LayerStorage, trained: bool = False
    ) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.recipe = recipe
        self.kept_in = recipe.kept_in or (weight.dtype if weight.dtype in HALVES else torch.bfloat16)
        self.weight = nn.Parameter(weight.detach().to(self.kept_in), requires_grad=trained)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().to(self.kept_in), requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = self.recipe.compute or x.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x.to(dtype), self.weight.to(dtype), bias).to(x.dtype)

    def quantize_weights(self, weight: torch.Tensor) -> None:
        _check_shape(weight, (self.out_features, self.in_features))
        with torch.no_grad():
            self.weight.copy_(weight)

    def dequantize_weights(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.weight.detach().to(dtype or self.kept_in)


def new_layer(recipe: LayerStorage, *sizes: int, **options: Any) -> QuantizedLinear | HalfLinear:
    """Return a newly initialized layer with the arguments of nn.Linear, stored by the recipe."""
    return make_layer(nn.Linear(*sizes, **options), recipe)


def make_layer(linear: nn.Linear, recipe: LayerStorage) -> QuantizedLinear | HalfLinear:
    """Return a layer with the weights of `linear`, stored by the recipe."""
    if recipe.spec is None:
        return HalfLinear(linear.weight, linear.bias, recipe=recipe, trained=linear.weight.requires_grad)
    return QuantizedLinear.from_weight(linear.weight, linear.bias, recipe)


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _check_layer(name: str, layer: Any, recipe: LayerStorage) -> None:
    if layer.weight.is_meta:
        raise UserError(f"{name} has no weights yet.", do="load the model's weights before quantizing it")
    try:
        check_storage(recipe, (layer.out_features, layer.in_features))
    except UserError as error:
        raise UserError(f"{name}: {error.message}", why=error.why, do=error.do) from error


def _check_shape(weight: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(weight.shape) != shape:
        raise UserError(f"A weight of shape {tuple(weight.shape)} does not match a layer of shape {shape}.")
