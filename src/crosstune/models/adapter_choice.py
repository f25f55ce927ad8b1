"""Choose the adapted layers by name, the same for every engine."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.options.method import layer_numbers
from crosstune.config.schema import Config
from crosstune.core.errors import UserError
from crosstune.core.names import match_names
from crosstune.core.protocols import Array
from crosstune.core.weights import orthogonal_by_name, uniform_by_name

STACKS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of stacked expert weights, in the order in which a model defines them."""
_NAMES_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
ROUTERS = ("gate", "router")
"""Names of the modules that choose the experts of each token."""
_WORD = re.compile(r"[A-Za-z0-9_]+")
DEFAULT_TARGETS = ("q_proj", "v_proj", "query_key_value", "qkv_proj", "c_attn")


@dataclass(frozen=True, kw_only=True)
class AdapterSettings:
    rank: int
    alpha: float
    dropout: float
    rank_stabilized: bool
    """Scale by alpha / sqrt(rank) (rsLoRA) instead of alpha / rank."""
    magnitudes: bool
    """DoRA: learn the magnitude of each row of the weight separately from its direction."""
    start: str = "default"
    """The value of --init_lora."""

    @classmethod
    def from_config(cls, config: Config, *, method: str) -> AdapterSettings:
        return cls(
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            rank_stabilized=config.use_rslora,
            magnitudes=method == "dora",
            start=config.init_lora,
        )

    def first_factors(self, name: str, shape: tuple[int, int], *, seed: int) -> tuple[Array, Array]:
        """Return the first A and B of a layer of `shape` (outputs, inputs) that do not depend on its weight."""
        if self.start == "orthogonal":
            return orthogonal_by_name(name, shape=shape, rank=self.rank, seed=seed)
        a = uniform_by_name(name, shape=(self.rank, shape[1]), seed=seed)
        return a, np.zeros((shape[0], self.rank), dtype=np.float32)

    def doubled(self) -> AdapterSettings:
        """Return the settings with twice the rank and the same scale."""
        factor = math.sqrt(2) if self.rank_stabilized else 2
        return replace(self, rank=2 * self.rank, alpha=factor * self.alpha)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The blocks of a model that may get adapters; by default all."""

    last: int | None = None
    """The number of last blocks; -1 means all."""
    numbers: frozenset[int] | None = None

    @classmethod
    def from_config(cls, config: Config) -> Layers:
        listed = config.layers_to_transform
        return cls(
            last=read_mlx_settings(config.mlx_config).num_layers,
            numbers=layer_numbers(listed) if listed is not None else None,
        )

    def choose(self, names: Sequence[str]) -> list[str]:
        """Return the names that belong to these blocks."""
        first, last = -1, max((_block(name) for name in names), default=-1)
        if self.last is not None and self.last >= 0:
            first = max(last + 1 - self.last, 0)
        listed = range(-1, last + 1) if self.numbers is None else self.numbers
        return [name for name in names if _block(name) >= first and _block(name) in listed]

    def check(self, names: Sequence[str]) -> None:
        """Raise for a block that the model does not have."""
        last, highest = max((_block(name) for name in names), default=-1), max(self.numbers or {-1})
        if highest > last >= 0:
            raise UserError(
                f"--layers_to_transform {highest} matches no layer of this model.",
                why=f"its layers have the numbers 0 to {last}.",
            )


ALL_LAYERS = Layers()


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The adapted layers, under the names in PEFT's settings."""

    modules: Sequence[str]
    parameters: Sequence[str] = ()
    """Weight names or their endings: expert stacks, and layers that PEFT mistakes for experts."""
    stacks: Sequence[str] = ()
    """The full names of all adapted expert stacks."""
    layers: Sequence[int] | None = None
    """The blocks that `modules` applies to; None for all."""
    fan_in_fan_out: bool = False
    """True for layers with transposed weights (GPT-2)."""
    saved: Sequence[str] = ()
    """The modules trained in full."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Parameter -> trained parameter that it shares its values with, such as a head and the embedding."""


def choose_names(
    linears: Sequence[str],
    targets: str,
    *,
    model: str,
    stacks: Sequence[str] = (),
    dora: bool = False,
    layers: Layers = ALL_LAYERS,
) -> list[str]:
    """Return the layers that `targets` selects: all, attention, default, comma-separated names, or a regex.

    `linears` excludes the output head; `stacks` are expert weights, which DoRA cannot adapt; `model` appears in errors.
    `layers` limits the choice to some blocks.
    """
    layers.check([*linears, *stacks])
    candidates = layers.choose([*linears, *stacks])
    if not candidates:
        raise UserError(
            "This model has no linear layers for adapters.",
            why=f"{model} has other layers only.",
            do="use --train_type full",
        )
    if targets == "all":
        return [name for name in candidates if not (dora and name in stacks)]
    if targets == "attention":
        if found := [name for name in candidates if _in_attention(name)]:
            return found
        raise UserError(
            "lora_target_modules attention matches no linear layer of this model.",
            why=f"no layer of {model} has attn or attention in its name.",
            do="use all, or layer names",
        )
    chosen = _named(candidates, targets)
    if dora and (experts := [name for name in candidates if name in chosen and name in stacks]):
        raise UserError(
            f"--train_type dora cannot adapt {experts[0]}.",
            why="it stacks several experts in one weight, for which DoRA is not defined.",
            do="use --train_type lora, or --lora_target_modules attention",
        )
    return [name for name in candidates if name in chosen]


def _named(linears: Sequence[str], targets: str) -> set[str]:
    """Return the layers that a comma-separated list of names or a regex selects."""
    parts = DEFAULT_TARGETS if targets == "default" else tuple(part.strip() for part in targets.split(","))
    found = {part: {name for name in linears if f".{name}".endswith(f".{part}")} for part in parts}
    patterns = [part for part in found if not _WORD.fullmatch(part)]
    for part, names in zip(patterns, match_names(patterns, linears), strict=True):
        if isinstance(names, set):  # an invalid pattern may be a part of a regex with commas
            found[part] |= names
    unmatched = [part for part, names in found.items() if not names]
    chosen = set[str]().union(*found.values())
    if unmatched and targets != "default":
        # The comma may be part of a regex.
        matched = match_names([targets], linears)[0]
        if isinstance(matched, str):
            raise UserError(f"lora_target_modules '{targets[:80]}' is not a valid pattern.", why=matched)
        chosen = matched
    if not chosen:
        kinds = sorted({name.rpartition(".")[2] for name in linears})
        raise UserError(
            f"lora_target_modules '{', '.join(unmatched)[:200]}' matches no linear layer of this model.",
            do=f"use all, names among: {', '.join(kinds)}, or a regex that matches full names",
        )
    return chosen


def choose_saved(
    parameters: Sequence[str],
    listed: str | None,
    *,
    adapted: Collection[str],
    tied: Mapping[str, str],
    model: str,
) -> list[str]:
    """Return the parameters of the modules in --modules_to_save.

    `tied` maps a parameter that is not among `parameters` to the parameter with its values.
    """
    chosen: set[str] = set()
    for part in dict.fromkeys(word.strip() for word in (listed or "").split(",") if word.strip()):
        inside = f".{part}."
        found = {tied.get(name, name) for name in (*parameters, *tied) if inside in f".{name}"}
        if not found:
            modules = sorted({name.split(".")[-2] for name in (*parameters, *tied) if "." in name})
            raise UserError(
                f"--modules_to_save {part[:200]} matches no module of this model.",
                do=f"use modules of {model}: {', '.join(modules)[:400]}",
            )
        covered = [name for name in adapted if any(p.startswith(f"{name}.") for p in found)]
        if covered:
            raise UserError(
                f"--modules_to_save {part} includes {covered[0]}, which has an adapter.",
                why="a layer is trained either in full or by an adapter.",
                do="remove it, or list other layers in --lora_target_modules",
            )
        chosen |= found
    return [name for name in parameters if name in chosen]


def token_parameters(shapes: Mapping[str, Sequence[int]], num_rows: int) -> list[str]:
    """Return the parameters with one row per token: embedding, output head and its bias; without parameters of blocks."""
    return [
        name
        for name, shape in shapes.items()
        if shape[:1]
        and shape[0] == num_rows
        and not any(part.isdigit() or "position" in part or part == "wpe" for part in name.split("."))
    ]


def router_parameters(names: Iterable[str]) -> list[str]:
    """Return the parameters of the routers of experts; raise if there are none."""
    found = [name for name in names if name.rpartition(".")[0].rpartition(".")[2] in ROUTERS]
    if not found:
        raise UserError(
            "--train_router needs a mixture of experts.",
            why=f"this model has no module named {' or '.join(ROUTERS)}.",
            do="remove --train_router, or name the modules in --modules_to_save",
        )
    return found


def saved_modules(config: Config, shapes: Mapping[str, Sequence[int]], num_rows: int) -> str | None:
    """Return --modules_to_save, with the routers if --train_router is set, and the modules of the tokens if --add_tokens is."""
    tokens = token_parameters(shapes, num_rows) if config.add_tokens else []
    routers = router_parameters(shapes) if config.train_router else []
    modules = dict.fromkeys(name.rpartition(".")[0] for name in [*routers, *tokens])
    return ",".join(filter(None, [config.modules_to_save, *modules])) or None


def name_saved(parameters: Sequence[str], modules: Iterable[str]) -> list[str]:
    """Return PEFT's modules_to_save for trained parameters: short names if they match no other module.

    PEFT compares the ends of names, even within a word: norm matches input_layernorm too.
    """
    saved = {name.rpartition(".")[0] for name in parameters}
    saved -= {name for name in saved if any(name.startswith(f"{outer}.") for outer in saved)}
    others = [name for name in modules if name not in saved]
    kinds = {name: name.rpartition(".")[2] for name in saved}
    unique = {kind for kind in kinds.values() if not any(other.endswith(kind) for other in others)}
    return sorted({kind if kind in unique else name for name, kind in kinds.items()})


def name_for_peft(
    layers: Sequence[str],
    stacks: Sequence[str],
    *,
    bare_layers: Sequence[str],
    bare_stacks: Sequence[str],
    fan_in_fan_out: bool = False,
) -> Targets:
    """Return PEFT's settings for adapted layers and stacks; `bare_...` have no adapter."""
    # In a mixture of experts, PEFT mistakes these layers for experts of older transformers versions. Their weights, listed
    # as parameters, get adapters of the same shape and name.
    renamed = _NAMES_OF_EXPERTS if stacks or bare_stacks else ()
    parameters = [name for name in layers if name.rpartition(".")[2] in renamed]
    modules = [name for name in layers if name not in parameters]
    blocks = _only_blocks(modules, bare_layers) if not (parameters or stacks) else None
    return Targets(
        modules=_short_names(modules, bare_layers if blocks is None else ()),
        layers=blocks,
        parameters=[
            *_short_names(stacks, bare_stacks, num_parts=2),
            *_short_names(
                [f"{name}.weight" for name in parameters],
                [f"{name}.weight" for name in bare_layers],
                num_parts=3,
            ),
        ],
        stacks=stacks,
        fan_in_fan_out=fan_in_fan_out,
    )


def check_start(start: str, stacks: Sequence[str]) -> None:
    """Raise for a value of --init_lora that stacks of experts do not support."""
    if stacks and start != "default":
        raise UserError(
            f"--init_lora {start} cannot start the adapter of {min(stacks)}.",
            why="it stacks the weights of several experts.",
            do="use --init_lora default, or --lora_target_modules attention",
        )


def describe_left_out(chosen: Sequence[str], experts: Sequence[str], *, why: str = "") -> list[str]:
    """Return a warning if `all` leaves some experts without an adapter."""
    left = [name for name in experts if name not in chosen]
    if not left:
        return []
    kinds = ", ".join(sorted({name.rpartition(".")[2] for name in chosen}))
    reason = f" ({why})" if why else ""
    return [
        f"--lora_target_modules all adapts {kinds} only: {len(left)} expert layers, such as {left[0]}, have no adapter{reason}"
    ]


def describe_reach(chosen: Sequence[str], layers: Sequence[str], *, targets: str) -> list[str]:
    """Return a warning if adapters reach fewer than half of the blocks, as names of attention do in a hybrid model."""
    blocks = {_block(name) for name in layers} - {-1}
    reached = {_block(name) for name in chosen} & blocks
    is_pattern = not all(_WORD.fullmatch(part.strip()) for part in targets.split(","))
    if 2 * len(reached) >= len(blocks) or is_pattern:  # a pattern may choose few blocks on purpose
        return []
    without = sorted({name.rpartition(".")[2] for name in layers if _block(name) not in reached})
    return [
        f"--lora_target_modules {targets[:80]} adapts {len(reached)} of {len(blocks)} blocks; the others contain "
        f"{', '.join(without)[:200]}; to adapt every block, use --lora_target_modules all"
    ]


def _in_attention(name: str) -> bool:
    return any("attn" in part or "attention" in part for part in name.split("."))


def _short_names(adapted: Sequence[str], bare: Sequence[str], *, num_parts: int = 1) -> list[str]:
    """Return names for PEFT's settings: the last `num_parts` parts, such as q_proj, or full names if the last parts would
    also match a layer without an adapter."""

    def endings(names: Iterable[str]) -> set[str]:
        return {".".join(name.split(".")[-num_parts:]) for name in names}

    return sorted(adapted if endings(adapted) & endings(bare) else endings(adapted))


def _only_blocks(adapted: Sequence[str], bare: Sequence[str]) -> list[int] | None:
    """Return the blocks of the adapted layers for PEFT's layers_to_transform, if block and last name distinguish them from
    the layers without an adapter; None if last names alone suffice, or if both do not."""
    kinds = {name.rpartition(".")[2] for name in adapted}
    alike = [name for name in bare if name.rpartition(".")[2] in kinds]
    blocks = {_block(name) for name in adapted}
    one_number = all(sum(part.isdigit() for part in name.split(".")) == 1 for name in (*adapted, *alike))
    return sorted(blocks) if alike and one_number and not blocks & set(map(_block, alike)) else None


def _block(name: str) -> int:
    """Return the block number in a name such as model.layers.3.mlp.up_proj; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)
