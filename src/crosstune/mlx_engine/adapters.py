"""Add LoRA and DoRA adapters to frozen linear layers and experts, and name the layers and arrays of a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.names import natural_key
from crosstune.core.protocols import Array
from crosstune.core.weights import principal_factors
from crosstune.mlx_engine.expert_adapters import (
    Adapter,
    ExpertAdapter,
    adapt_experts,
    expert_layers,
    expert_stacks,
    stack_of,
)
from crosstune.mlx_engine.quantized import dense_weight, linear_shape
from crosstune.models.adapter_choice import (
    ALL_LAYERS,
    ROUTERS,
    AdapterSettings,
    Layers,
    Targets,
    check_start,
    choose_names,
    choose_saved,
    describe_left_out,
    describe_reach,
    name_for_peft,
    name_saved,
    saved_modules,
)

HEADS = ("lm_head", "embed_out", "output", "head")


def add_adapters(
    model: nn.Module, *, targets: str, settings: AdapterSettings, seed: int, layers: Layers = ALL_LAYERS
) -> dict[str, Adapter]:
    """Freeze the model, add an adapter to each chosen layer or stack of experts, and return the adapters by canonical name."""
    linears, stacks = linear_layers(model), expert_stacks(model)
    chosen = choose_targets(model, targets, dora=settings.magnitudes, layers=layers)
    check_start(settings.start, list(stacks.keys() & chosen))
    kind = DoraLinear if settings.magnitudes else AdaptedLinear
    adapters: dict[str, Adapter] = {
        name: kind(linears[name], name=name, settings=settings, seed=seed)
        for name in chosen
        if name not in stacks
    }
    model.freeze()
    model.update_modules(tree_unflatten(list(adapters.items())))
    for adapter in adapters.values():
        adapter.base.freeze()
    for name in chosen:
        if name in stacks:
            adapters[name] = adapt_experts(model, name, stacks[name], settings=settings, seed=seed)
    return {name: adapters[name] for name in chosen}


class AdaptedLinear(Adapter):
    """y = base(x) + scale * B(A(dropout(x))). A and B are stored in fp32 and cast to the dtype of x."""

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__(settings)
        self.base = base
        self._start: list[tuple[Array, Array]] = []
        if settings.start != "pissa":
            a, b = settings.first_factors(name, linear_shape(base), seed=seed)
        else:
            dense = dense_weight(base, mx.float32)
            a, b = principal_factors(np.array(dense), rank=settings.rank, scale=self._scale)
            self._start = [(a, b)]
            base.weight = (dense - self._scale * (mx.array(b) @ mx.array(a))).astype(base.weight.dtype)
        self.lora_A = mx.array(a)
        self.lora_B = mx.array(b)

    def __call__(self, x: mx.array) -> mx.array:
        out = self.base(x)
        return out + self.low_rank(x, out.dtype)

    def low_rank(self, x: mx.array, dtype: mx.Dtype) -> mx.array:
        low = self.drop(x).astype(dtype) @ self.lora_A.astype(dtype).T
        return low @ (self.lora_B * self._scale).astype(dtype).T

    def fold(self, weight: mx.array) -> mx.array:
        """Return a frozen weight with this adapter merged, in fp32."""
        return weight.astype(mx.float32) + self._scale * (self.lora_B @ self.lora_A)

    @property
    def start(self) -> tuple[Array, Array] | None:
        """The initial A and B if they were subtracted from the base."""
        return self._start[0] if self._start else None

    def original(self) -> nn.Module | mx.array:
        """Return the base, or its weight before the initial adapter was subtracted."""
        if self.start is None:
            return self.base
        a, b = map(mx.array, self.start)
        return dense_weight(self.base, mx.float32) + self._scale * (b @ a)


class DoraLinear(AdaptedLinear):
    """W + scale * B A with each row rescaled to a learned norm.

    The row norms are treated as constants in the backward pass, as the authors of DoRA propose to save memory.
    """

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__(base, name=name, settings=settings, seed=seed)
        self.lora_magnitude_vector = self._row_norms()

    def __call__(self, x: mx.array) -> mx.array:
        out = self.base(x)
        ratio = (self.lora_magnitude_vector / self._row_norms()).astype(out.dtype)
        bias = self.base.get("bias")
        plain = out if bias is None else out - bias
        scaled = ratio * (plain + self.low_rank(x, out.dtype))
        return scaled if bias is None else scaled + bias

    def fold(self, weight: mx.array) -> mx.array:
        added = super().fold(weight)
        return (self.lora_magnitude_vector / mx.linalg.norm(added, axis=1))[:, None] * added

    def _row_norms(self) -> mx.array:
        added = super().fold(dense_weight(self.base, mx.float32))
        return mx.stop_gradient(mx.linalg.norm(added, axis=1))


def choose_targets(model: nn.Module, targets: str, *, dora: bool, layers: Layers = ALL_LAYERS) -> list[str]:
    """Return the linear layers and the stacks of experts that get an adapter."""
    return choose_names(
        list(linear_layers(model)),
        targets,
        stacks=list(expert_stacks(model)),
        dora=dora,
        model=str(getattr(model, "model_type", "the model")),
        layers=layers,
    )


def warn_of_left_out(
    model: nn.Module, targets: str, *, dora: bool, quantized: bool, layers: Layers
) -> list[str]:
    """Return warnings about experts without adapters under `all`, about names that reach few blocks, and about experts that
    stay dense in a quantized base."""
    experts = expert_layers(model)
    chosen = choose_targets(model, targets, dora=dora, layers=layers)
    why = "DoRA does not support experts" if dora else "they are no gate, up and down projections"
    if targets == "all":
        warnings = describe_left_out(chosen, layers.choose([*dict.fromkeys(map(stack_of, experts))]), why=why)
    else:
        warnings = describe_reach(chosen, layers.choose(list(linear_layers(model))), targets=targets)
    modules = dict(model.named_modules())
    dense = [name for name in experts if "scales" not in modules[name]]
    if quantized and dense:
        warnings.append(
            f"quantizes linear layers only: {len(dense)} expert layers, such as {dense[0]}, stay dense "
            "(a torch backend quantizes experts too, and so does `crosstune convert MODEL --to mlx`)"
        )
    return warnings


def saved_parameters(model: nn.Module, config: Config, *, adapted: Collection[str]) -> list[str]:
    """Return the arrays that --modules_to_save and --add_tokens train in full; raise for a quantized module."""
    names = {name: array.shape for name, array in tree_flatten(model.parameters())}
    rows = [module.weight.shape[0] for module in model.modules() if isinstance(module, nn.Embedding)]
    listed = saved_modules(config, names, max(rows, default=0))
    if not listed:
        return []
    kind = str(getattr(model, "model_type", "the model"))
    found = choose_saved(list(names), listed, adapted=adapted, tied=tied_parameters(model), model=kind)
    if packed := [name for name in found if name.endswith(".scales")]:
        raise UserError(
            f"--modules_to_save cannot train {packed[0].removesuffix('.scales')}.",
            why="its weights are quantized, and quantized weights cannot be updated.",
            do="use the original model; --train_type qlora quantizes its linear layers and no other modules",
        )
    return found


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Return the head's name mapped to the embedding's, if the model has no head of its own and reuses the array of its
    embedding."""
    names = [name for name, _ in model.named_modules()]
    embedding = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    if len(embedding) != 1 or any(is_head(name) for name in names):
        return {}
    return {"lm_head.weight": f"{embedding[0]}.weight"}


def train_in_full(model: nn.Module, names: Sequence[str]) -> None:
    """Unfreeze arrays of a frozen model."""
    modules = dict(model.named_modules())
    for name in names:
        module, _, array = name.rpartition(".")
        modules[module].unfreeze(recurse=False, keys=[array])


def name_targets(model: nn.Module, adapters: dict[str, Adapter], *, saved: Sequence[str] = ()) -> Targets:
    """Return the adapted layers and the arrays trained in full in the form of PEFT's settings."""
    without = [name for name in linear_layers(model) if name.removesuffix(".base") not in adapters]
    stacks = [name for name, adapter in adapters.items() if isinstance(adapter, ExpertAdapter)]
    experts = dict.fromkeys(stack_of(name) for name in expert_layers(model))
    found = name_for_peft(
        [name for name in adapters if name not in stacks],
        stacks,
        bare_layers=without,
        bare_stacks=[name for name in experts if name not in stacks],
    )
    tied = {name: source for name, source in tied_parameters(model).items() if source in saved}
    modules = [name for name, _ in model.named_modules()]
    return replace(found, saved=name_saved([*saved, *tied], modules), tied=tied)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return all linear layers, quantized or not, sorted by name, except the output head and the routers of experts."""
    routed = {name.rpartition(".")[0].rpartition(".")[0] for name in expert_layers(model)}
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.QuantizedLinear))
        and not is_head(name)
        and not (name.rpartition(".")[0] in routed and name.rpartition(".")[2] in ROUTERS)
    }
    return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))


def is_head(name: str) -> bool:
    return ".layers." not in f".{name}" and name.rpartition(".")[2] in HEADS


def canonical_name(path: str) -> str:
    """Return the canonical name of a trained array from its path in the model."""
    return f"{path}.weight" if path.endswith((".lora_A", ".lora_B")) else path


def model_path(canonical: str) -> str:
    return canonical.removesuffix(".weight") if ".lora_" in canonical else canonical
