"""Describe vision-language families: the tokens that a picture becomes, the weights that read pictures, and their memory."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.json_files import read_json

Pieces = list[tuple[str, int]]
"""Texts and how often each is repeated; each is tokenized alone."""

_ASPECT_LIMIT = 200
_TILES_LIMIT = 4096
"""The largest side of a picture of Idefics3 before it is cut into tiles."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how its pictures become tokens, and the names of its parts."""

    layout: str
    """`grid`: tokens by the size of the picture; `fixed`: always the same number; `tiles`: the same number for each tile."""
    placeholder: str
    """The text that the chat template writes for a picture."""
    soft_token: str
    """The token whose embedding is replaced by a part of the picture."""
    around: str = ""
    """Text that the family writes before and after each picture."""
    marks: str = ""
    """The model's argument that marks the tokens of pictures, if it has one."""
    tower: str
    """A regular expression of the tower's parameters, without the projector."""
    projector: str
    specials: tuple[str, ...] = ()
    """Other texts that only a picture may contain."""


_QWEN = Family(
    layout="grid",
    placeholder="<|image_pad|>",
    soft_token="<|image_pad|>",
    marks="mm_token_type_ids",
    tower=r"(^|\.)visual\.(?!(deepstack_)?merger)",
    projector=r"(^|\.)visual\.(deepstack_)?merger",
    specials=("<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
)
_IDEFICS = Family(
    layout="tiles",
    placeholder="<image>",
    soft_token="<image>",
    tower=r"(^|\.)vision_model\.",
    projector=r"(^|\.)connector\.",
    specials=("<fake_token_around_image>", "<global-img>"),
)
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "gemma3": Family(
        layout="fixed",
        placeholder="<start_of_image>",
        soft_token="<image_soft_token>",
        around="\n\n",
        marks="token_type_ids",
        tower=r"(^|\.)vision_tower\.",
        projector=r"(^|\.)multi_modal_projector\.",
        specials=("<end_of_image>",),
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
}
"""model_type -> family."""
TEXT_DEFAULTS: Mapping[str, dict[str, Any]] = {
    "gemma3": {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
}
"""Sizes of the language model that config.json may leave out."""
_OTHER = Family(
    layout="",
    placeholder="",
    soft_token="",
    tower=r"(^|\.)(vision\w*|visual\w*|image_encoder)\.(?!.*(merger|projector))",
    projector=r"projector|connector|merger|aligner",
)
"""A family whose pictures are not read; its text trains."""
KNOWN = "Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Gemma 3, Idefics3 and SmolVLM"


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A family with the settings of a model folder."""

    family: Family
    soft_id: int
    """The id of the soft token in config.json."""
    patch: int = 14
    """Pixels of a side of a patch of the tower."""
    merge: int = 1
    """Patches of a side of a token, for `grid`."""
    fewest_pixels: int = 0
    most_pixels: int = 0
    num_soft: int = 0
    """Tokens of a picture or of a tile."""
    longest: int = 0
    """The longest side of a picture before it is cut into tiles."""
    tile: int = 0
    """The side of a tile, or of every picture of `fixed`."""
    splits: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of transformers' image processor that differ from the folder's."""

    def pieces(self, width: int, height: int) -> Pieces:
        """Return the text of a picture of this size."""
        family = self.family
        if family.layout == "grid":
            rows, columns = self.grid(width, height)
            return [(family.soft_token, rows * columns)]
        if family.layout == "fixed":
            return [(family.placeholder, 1), (family.soft_token, self.num_soft), (family.specials[0], 1)]
        around, overview = family.specials
        rows, columns = self.grid(width, height)
        found: Pieces = []
        for row in range(rows):
            for column in range(columns):
                line = "\n" if column == 0 and row else ""
                found.append((f"{line}{around}<row_{row + 1}_col_{column + 1}>", 1))
                found.append((family.soft_token, self.num_soft))
        found.append(("\n\n" * bool(rows) + around + overview, 1))
        return [*found, (family.soft_token, self.num_soft), (around, 1)]

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of tokens (`grid`) or of tiles (`tiles`; 0 for a picture that is not cut)."""
        if self.family.layout == "grid":
            return self._token_grid(width, height)
        if not self.splits:
            return 0, 0
        width, height = _scaled(width, height, self.longest, even=True)
        if max(width, height) > _TILES_LIMIT:
            width, height = _scaled(width, height, _TILES_LIMIT)
        width, height = _scaled(width, height, math.ceil(max(width, height) / self.tile) * self.tile)
        rows, columns = math.ceil(height / self.tile), math.ceil(width / self.tile)
        return (0, 0) if rows == columns == 1 else (rows, columns)

    def _token_grid(self, width: int, height: int) -> tuple[int, int]:
        if max(width, height) > _ASPECT_LIMIT * min(width, height):
            raise UserError(
                f"A picture of {width} x {height} pixels is too narrow for this model.",
                why=f"one side may be at most {_ASPECT_LIMIT} times the other.",
                do="cut the picture, or remove the row",
            )
        side = self.patch * self.merge
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > self.most_pixels:
            scale = math.sqrt(height * width / self.most_pixels)
            rows, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
        elif rows * columns * side * side < self.fewest_pixels:
            scale = math.sqrt(self.fewest_pixels / (height * width))
            rows, columns = (math.ceil(length * scale / side) for length in (height, width))
        return rows, columns

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a picture, with the tokens around its parts counted as one each."""
        return sum(count for _, count in self.pieces(width, height))

    def num_patches(self, width: int, height: int) -> int:
        """Return the number of patches that the tower computes for a picture."""
        if self.family.layout == "grid":
            rows, columns = self.grid(width, height)
            return rows * columns * self.merge**2
        rows, columns = self.grid(width, height) if self.family.layout == "tiles" else (0, 0)
        return (rows * columns + 1) * (self.tile // self.patch) ** 2

    def limited(self, pixels: int | None) -> Vision:
        """Return the description with at most this many pixels for each picture."""
        if pixels is None:
            return self
        if self.family.layout == "grid":
            most, least = min(self.most_pixels, pixels), (self.patch * self.merge) ** 2
            if pixels < least:
                raise _too_few(pixels, least)
            fewest = min(self.fewest_pixels, most)
            sizes = {"size": {"shortest_edge": fewest, "longest_edge": most}}
            return replace(self, most_pixels=most, fewest_pixels=fewest, settings=sizes)
        least = self.tile * self.tile
        if pixels < least:
            raise _too_few(pixels, least)
        if self.family.layout == "fixed":
            return self
        longest = min(self.longest, math.isqrt(pixels) // self.tile * self.tile)
        return replace(self, longest=longest, settings={"size": {"longest_edge": longest}})


def _scaled(width: int, height: int, longest: int, *, even: bool = False) -> tuple[int, int]:
    """Return the sizes with this longest side. The other is rounded down, then up to an even number if `even`."""
    short = int(longest / (width / height)) if width >= height else int(longest * (width / height))
    short = max(1, short + short % 2 if even else short)
    return (longest, short) if width >= height else (short, longest)


def _too_few(pixels: int, least: int) -> UserError:
    return UserError(
        f"--image_pixels {pixels} is too small for this model.",
        why=f"it reads at least {least} pixels of each picture.",
        do=f"use --image_pixels {least} or more",
    )


def read_vision(folder: Path) -> Vision | str:
    """Return the description of a model folder, or why it cannot read pictures."""
    config = read_json(folder / "config.json", foreign=True)
    model_type = str(config.get("model_type") or "")
    family = FAMILIES.get(model_type)
    if family is None:
        reads = isinstance(config.get("vision_config"), dict)
        return (
            f"crosstune reads pictures with {KNOWN}, not with {model_type}"
            if reads
            else "this model reads text only"
        )
    processor = read_json(folder / "processor_config.json", foreign=True)
    nested = processor.get("image_processor")
    settings = (
        nested if isinstance(nested, dict) else read_json(folder / "preprocessor_config.json", foreign=True)
    )
    if not settings:
        return f"{folder} has no preprocessor_config.json, which says how pictures become tensors"
    try:
        return _read(family, config, settings, processor)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"the settings of pictures in {folder} cannot be read ({type(error).__name__}: {error})"


def _read(
    family: Family, config: Mapping[str, Any], settings: Mapping[str, Any], processor: Mapping[str, Any]
) -> Vision:
    tower, size = config["vision_config"], settings.get("size") or {}
    if family.layout == "grid":
        found = Vision(
            family=family,
            soft_id=int(config["image_token_id"]),
            patch=int(settings.get("patch_size", 14)),
            merge=int(settings.get("merge_size", 2)),
            fewest_pixels=int(settings.get("min_pixels") or size.get("shortest_edge", 56 * 56)),
            most_pixels=int(settings.get("max_pixels") or size.get("longest_edge", 28 * 28 * 1280)),
        )
    elif family.layout == "fixed":
        found = Vision(
            family=family,
            soft_id=int(config.get("image_token_index", config.get("image_token_id"))),
            patch=int(tower["patch_size"]),
            tile=int(tower["image_size"]),
            num_soft=int(config.get("mm_tokens_per_image", 256)),
            settings={"do_pan_and_scan": False},
        )
    else:
        tile, patch, scale = int(tower["image_size"]), int(tower["patch_size"]), int(config["scale_factor"])
        found = Vision(
            family=family,
            soft_id=int(config["image_token_id"]),
            patch=patch,
            tile=int((settings.get("max_image_size") or {}).get("longest_edge", tile)),
            longest=int(size.get("longest_edge", 4 * tile)),
            splits=bool(settings.get("do_image_splitting", True)),
            num_soft=int(processor.get("image_seq_len") or (tile // patch) ** 2 // scale**2),
        )
    if min(found.patch, found.merge, found.tile or 1, found.longest or 1) < 1 or found.fewest_pixels < 0:
        raise ValueError("a size is not positive")
    if family.layout == "grid" and found.most_pixels < (found.patch * found.merge) ** 2:
        raise ValueError("the largest picture has no token")
    return found


def family_of(model: Any) -> Family | None:
    """Return the family of a model of transformers by its config; None for a language model."""
    config, names = getattr(model, "config", None), ("model_type", "vision_config")
    return vision_family({name: getattr(config, name, None) for name in names})


def vision_family(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a model by its config.json; None for a language model."""
    found = FAMILIES.get(config.get("model_type") or "")
    return found or (_OTHER if config.get("vision_config") is not None else None)


def is_tower(name: str, family: Family | None) -> bool:
    """Return True for a layer or parameter of the tower, by its canonical name."""
    return family is not None and re.search(family.tower, f"{name}.") is not None


def is_projector(name: str, family: Family | None) -> bool:
    return family is not None and re.search(family.projector, f"{name}.") is not None


def reads_pictures(name: str, family: Family | None) -> bool:
    return is_tower(name, family) or is_projector(name, family)


_TEMPORARY = 3
"""Number of tensors as wide as the MLP that are in memory at once in a layer's forward pass; the norms and attention need
less."""


@dataclass(frozen=True, kw_only=True)
class Tower:
    """The sizes of a tower. It computes one vector for each patch of a picture."""

    hidden: int
    intermediate: int
    num_layers: int
    patch_values: int
    """The values of a patch: pixels of three colors."""
    num_parameters: int = 0
    """The total for tower and projector."""
    projector: int = 0
    """The part of the projector."""

    def adapters(self, rank: int) -> int:
        """Return the parameters of adapters on all linear layers: four of attention, two of the MLP."""
        return rank * self.num_layers * (4 * 2 * self.hidden + 2 * (self.hidden + self.intermediate))

    def input_bytes(self, patches: int) -> int:
        """Return the bytes of the pixels, which a step holds in fp32."""
        return 4 * patches * self.patch_values

    def forward_bytes(self, patches: int, *, width: int) -> int:
        """Return the temporary bytes of a forward pass without gradients."""
        return patches * (width * (4 * self.hidden + _TEMPORARY * self.intermediate) + 4 * self.hidden)

    def kept_bytes(self, patches: int, *, width: int, checkpointing: bool) -> int:
        """Return the bytes that a trained tower keeps for its backward pass."""
        layer = patches * width * (9 * self.hidden + _TEMPORARY * self.intermediate)
        if checkpointing:
            return self.num_layers * patches * width * self.hidden + layer
        return self.num_layers * layer


def read_tower(config: Mapping[str, Any]) -> Tower | None:
    """Return the tower that a config.json describes, with its parameters from its sizes; None for a language model."""
    found = config.get("vision_config")
    if not isinstance(found, dict):
        return None

    def size(*names: str, default: int) -> int:
        given = next((found[name] for name in names if isinstance(found.get(name), int)), default)
        return given if given > 0 else default

    hidden = size("embed_dim", "hidden_size", default=1152)
    if config.get("model_type") in ("qwen2_5_vl", "qwen3_vl"):
        hidden = size("hidden_size", default=hidden)
    intermediate = size("intermediate_size", default=size("mlp_ratio", default=4) * hidden)
    layers, patch = size("depth", "num_hidden_layers", default=12), size("patch_size", default=14)
    frames = size("temporal_patch_size", default=1 if "depth" not in found else 2)
    values = 3 * frames * patch * patch
    counted = layers * (4 * hidden * hidden + 2 * hidden * intermediate) + values * hidden
    return Tower(
        hidden=hidden,
        intermediate=intermediate,
        num_layers=layers,
        patch_values=values,
        num_parameters=counted,
    )
