"""Add LoRA and DoRA adapters to frozen linear layers, and LoRA to stacks of experts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.core.protocols import Array
from crosstune.core.weights import principal_factors
from crosstune.estimate.vision_families import family_of, is_projector, is_tower
from crosstune.models.adapter_choice import (
    ALL_LAYERS,
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
from crosstune.torch_engine.experts import AdaptedStack, replace_stack
from crosstune.torch_engine.loading.weight_forms import expert_stacks, expert_weights, linear_layers
from crosstune.torch_engine.quantized import (
    QuantLinear,
    dense_weight,
    is_conv1d,
    is_linear,
    linear_shape,
    weight_device,
)
from crosstune.torch_engine.sharding.local_shard import is_sharded


class AdaptedLinear(nn.Module):
    """y = base(x) + scale * B(A(dropout(x))). A and B are stored in fp32 and cast to the dtype of x."""

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__()
        assert is_linear(base), type(base)
        self.base: Any = base
        self.scale = settings.scale
        self.dropout = settings.dropout
        device = weight_device(base)
        self.start: tuple[Array, Array] | None = None
        """The initial A and B if they were subtracted from the base."""
        if isinstance(base, QuantLinear) and base.stored.error_factors is not None:
            (a, b), base.stored.error_factors = base.stored.error_factors, None
        elif settings.start != "pissa":
            a, b = settings.first_factors(name, linear_shape(base), seed=seed)
        else:
            dense = dense_weight(base, torch.float32)
            a, b = self.start = principal_factors(dense.cpu().numpy(), rank=settings.rank, scale=self.scale)
            left = dense - self.scale * (torch.from_numpy(b) @ torch.from_numpy(a)).to(device)
            self.base.weight.data.copy_(left.T if is_conv1d(base) else left)
        self.lora_A = nn.Parameter(torch.tensor(a, device=device))
        self.lora_B = nn.Parameter(torch.tensor(b, device=device))
        self.held: tuple[torch.Tensor, torch.Tensor] | None = None
        """A and scale * B in the compute dtype, cached while the weights do not change."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.low_rank(x, out.dtype)

    def low_rank(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        dropped = F.dropout(x, self.dropout, self.training) if self.dropout else x
        casts = torch.is_autocast_enabled(x.device.type)
        if not casts:
            dropped = dropped.to(dtype)
        held = self.held
        if held is None or not (casts or held[0].dtype == dropped.dtype):
            held = self.factors(dropped.dtype)
        return F.linear(F.linear(dropped, held[0]), held[1]).to(dtype)

    def factors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A and scale * B in a dtype."""
        return self.lora_A.to(dtype), (self.lora_B * self.scale).to(dtype)

    def trained(self) -> dict[str, nn.Parameter]:
        return {"lora_A.weight": self.lora_A, "lora_B.weight": self.lora_B}

    def merged(self) -> torch.Tensor:
        """Return the adapter folded into the base weight, in fp32."""
        return dense_weight(self.base, torch.float32) + self.scale * (self.lora_B @ self.lora_A).detach()


class DoraLinear(AdaptedLinear):
    """W + scale * B A with each row rescaled to a learned norm.

    The row norms are constants in the backward pass, as the DoRA paper proposes to save memory.
    """

    def __init__(self, base: nn.Module, *, name: str, settings: AdapterSettings, seed: int) -> None:
        super().__init__(base, name=name, settings=settings, seed=seed)
        self.lora_magnitude_vector = nn.Parameter(self._row_lengths())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            ratio = self.lora_magnitude_vector / self._row_lengths()
        out = self.base(x)
        ratio = ratio.to(out.dtype)
        bias = self.base.bias
        plain = out if bias is None else out - bias.to(out.dtype)
        scaled = ratio * (plain + self.low_rank(x, out.dtype))
        return scaled if bias is None else scaled + bias.to(out.dtype)

    def trained(self) -> dict[str, nn.Parameter]:
        return super().trained() | {"lora_magnitude_vector": self.lora_magnitude_vector}

    def merged(self) -> torch.Tensor:
        ratio = self.lora_magnitude_vector.detach() / self._row_lengths()
        return ratio[:, None] * super().merged()

    @torch.no_grad()
    def _row_lengths(self) -> torch.Tensor:
        return torch.linalg.vector_norm(AdaptedLinear.merged(self), dim=1)


Adapted = AdaptedLinear | AdaptedStack


def add_adapters(
    model: nn.Module, *, targets: str, settings: AdapterSettings, seed: int
) -> dict[str, Adapted]:
    """Freeze the model, add an adapter to each chosen layer or expert stack, and return the adapters by canonical name."""
    names = choose_targets(model, targets, dora=settings.magnitudes)
    model.requires_grad_(False)
    return _adapt_layers(model, names, settings=settings, seed=seed)


def adapt(model: nn.Module, plan: Plan, *, autocast: torch.dtype | None) -> dict[str, Adapted]:
    """Freeze the model and add the adapters of the plan, if its method has any."""
    if plan.method not in ADAPTER_METHODS:
        return {}
    model.requires_grad_(False)
    names = choose_adapted(model, plan)
    for name in saved_parameters(model, plan, adapted=names):
        model.get_parameter(name).requires_grad_()
    return adapt_part(model, model, names, plan=plan, autocast=autocast)


def saved_parameters(model: nn.Module, plan: Plan, *, adapted: Collection[str]) -> list[str]:
    """Return the parameters that --modules_to_save, --add_tokens and --train_projector train in full."""
    tied = tied_parameters(model)
    shapes = {name: p.shape for name, p in model.named_parameters() if name not in tied}
    rows = [len(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)]
    projector = _projector(model, plan)
    return projector + choose_saved(
        [name for name in shapes if name not in projector],
        saved_modules(plan.config, shapes, max(rows, default=0)),
        adapted=adapted,
        tied=tied,
        model=type(model).__name__,
    )


def _projector(model: nn.Module, plan: Plan) -> list[str]:
    """Return the parameters of the projector, if --train_projector trains them."""
    family = family_of(getattr(model, "config", None))
    for option in ("train_projector", "train_vision_tower"):
        if getattr(plan.config, option) and family is None:
            raise UserError(
                f"--{option} does not work with {type(model).__name__}.",
                why="it reads text only.",
                do="remove it, or use a vision-language model",
            )
    if not plan.config.train_projector:
        return []
    return [name for name, _ in model.named_parameters() if is_projector(name, family)]


def frozen_vision(model: nn.Module, plan: Plan) -> set[str]:
    """Return the parameters of tower and projector that a model trained in full keeps."""
    trained, family = _projector(model, plan), family_of(getattr(model, "config", None))
    return {
        name
        for name, _ in model.named_parameters()
        if (is_tower(name, family) and not plan.config.train_vision_tower)
        or (is_projector(name, family) and name not in trained)
    }


def tied_parameters(model: Any) -> dict[str, str]:
    """Return the names that share the values of another parameter, with its name."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def choose_adapted(model: nn.Module, plan: Plan) -> list[str]:
    """Return the layers and expert stacks that the plan adapts."""
    names = choose_targets(
        model,
        plan.config.lora_target_modules,
        dora=plan.method == "dora",
        layers=Layers.from_config(plan.config),
        tower=plan.config.train_vision_tower,
    )
    check_start(plan.config.init_lora, list(set(names) & set(expert_stacks(model))))
    return names


def adapt_part(
    model: nn.Module, part: nn.Module, names: Sequence[str], *, plan: Plan, autocast: torch.dtype | None
) -> dict[str, Adapted]:
    """Add adapters to the named layers in a part of the model, and cast its frozen weights to the autocast dtype."""
    settings = AdapterSettings.from_config(plan.config, method=plan.method)
    adapters = _adapt_layers(model, names, settings=settings, seed=plan.config.seed)
    if autocast is not None:
        _cast_frozen(part, autocast)
    return adapters


def _adapt_layers(
    model: nn.Module, names: Sequence[str], *, settings: AdapterSettings, seed: int
) -> dict[str, Adapted]:
    kind = DoraLinear if settings.magnitudes else AdaptedLinear
    stacks = set(expert_stacks(model))
    adapters: dict[str, Adapted] = {}
    for name in names:
        parent_name, _, child = name.rpartition(".")
        parent: Any = model.get_submodule(parent_name)
        base = getattr(parent, child)
        if name in stacks:
            adapters[name] = AdaptedStack(
                base, name=name, settings=settings, seed=seed, transposed=parent.is_transposed
            )
            replace_stack(parent, child, adapters[name])
        else:
            adapters[name] = kind(base, name=name, settings=settings, seed=seed)
            setattr(parent, child, adapters[name])
    return adapters


def _cast_frozen(part: nn.Module, dtype: torch.dtype) -> None:
    """Cast frozen linear weights to the autocast dtype: half the memory, and the same values as a cast at each use."""
    shared = {id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)}
    for module in part.modules():
        if isinstance(module, AdaptedStack) and isinstance(module.base, nn.Parameter):
            if not is_sharded(module.base):
                module.base.data = module.base.data.to(dtype)
        elif (
            is_linear(module)
            and not isinstance(module, QuantLinear)
            and not is_sharded(module.weight)
            and not module.weight.requires_grad
            and id(module.weight) not in shared
        ):
            module.to(dtype)


def name_targets(model: nn.Module, adapters: Mapping[str, Adapted], *, saved: Sequence[str] = ()) -> Targets:
    """Return the adapted layers and the parameters trained in full under their names in PEFT's settings."""
    stacks = [name for name, adapter in adapters.items() if isinstance(adapter, AdaptedStack)]
    layers = [name for name in adapters if name not in stacks]
    without = [name for name in linear_layers(model) if name.removesuffix(".base") not in adapters]
    # PEFT adapts all of these with a matching name.
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
    without += [name for name, module in model.named_modules() if isinstance(module, kinds)]
    bases = [adapters[name].base for name in layers]
    found = name_for_peft(
        layers,
        stacks,
        bare_layers=without,
        bare_stacks=[name for name in expert_weights(model) if name not in stacks],
        fan_in_fan_out=bool(bases) and all(is_conv1d(base) for base in bases),
    )
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    tied = {name: source for name, source in tied_parameters(model).items() if source in saved}
    return replace(found, saved=name_saved([*saved, *tied], modules), tied=tied)


def choose_targets(
    model: nn.Module, targets: str, *, dora: bool, layers: Layers = ALL_LAYERS, tower: bool = False
) -> list[str]:
    """Return the linear layers and expert stacks that match `targets`: of the language model, and of the `tower` too."""
    family, stacks = family_of(getattr(model, "config", None)), expert_stacks(model)
    linears = language_layers(model)
    layers.check([*linears, *stacks])  # they are blocks of the language model
    kept = layers.choose([*linears, *stacks])
    reader = [name for name in linear_layers(model) if tower and is_tower(name, family)]
    return choose_names(
        [*(name for name in kept if name not in stacks), *reader],
        targets,
        stacks=[name for name in kept if name in stacks],
        dora=dora,
        model=type(model).__name__,
    )


def language_layers(model: nn.Module) -> list[str]:
    """Return the linear layers of the language model, without those that read pictures."""
    family = family_of(getattr(model, "config", None))
    return [
        name for name in linear_layers(model) if not is_tower(name, family) and not is_projector(name, family)
    ]


def warn_of_left_out(model: nn.Module, chosen: Sequence[str], plan: Plan) -> list[str]:
    """Return a warning if the target `all` does not include expert weights, or if others reach few blocks."""
    targets, layers = plan.config.lora_target_modules, Layers.from_config(plan.config)
    if targets != "all":
        return describe_reach(chosen, layers.choose(language_layers(model)), targets=targets)
    by_model = f"{type(model).__name__} computes their matmuls itself"
    experts = layers.choose(expert_weights(model))
    why = "DoRA does not support experts" if plan.method == "dora" else by_model
    return describe_left_out(chosen, experts, why=why)
