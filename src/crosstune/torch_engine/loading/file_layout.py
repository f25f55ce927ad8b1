"""Map the tensors in a folder's files to the model's tensors: transformers renames, stacks and splits some on load."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.core.errors import UserError
from crosstune.core.names import natural_key
from crosstune.torch_engine.loading.blocks import Expansion
from crosstune.torch_engine.loading.stream import Place, read_ahead


@dataclass(frozen=True, kw_only=True)
class Group:
    """Tensors of the files that are converted together."""

    target: str
    """The model's tensor; the first if a tensor of the files is split."""
    files: dict[str, str | None]
    """Name in the files -> the matching pattern of `converter`, in natural order."""
    converter: Any = None
    """transformers' WeightConverter; None if the tensor is only renamed."""


class FileLayout:
    """The conversions that transformers applies to a model's files."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, ignored: re.Pattern[str] | None = None
    ) -> None:
        self.model = model
        transforms = _transforms(model)
        self._renamings = [t for t in transforms if not hasattr(t, "operations")]
        self._converters = [t for t in transforms if hasattr(t, "operations")]
        self._expected = set(model.state_dict())
        self.groups = [
            group
            for group in self._group(names)
            if group.target in self._expected or ignored is None or not ignored.search(group.target)
        ]

    @property
    def is_plain(self) -> bool:
        """True if every tensor has the same name in the files as in the model."""
        return all(group.converter is None and group.target in group.files for group in self.groups)

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's tensors, given the shapes in the files."""
        found: dict[str, tuple[int, ...]] = {}
        for group in self.groups:
            tensors = [torch.empty(shapes[name], device="meta") for name in group.files]
            found |= {name: tuple(tensor.shape) for name, tensor in self.convert(group, tensors).items()}
        return found

    def read(
        self, places: dict[str, Place], *, num_workers: int
    ) -> Iterator[tuple[Group, dict[str, torch.Tensor]]]:
        """Yield the model's tensors group by group, sorted by name, so that a bias precedes its weight."""
        names = [name for group in self.groups for name in group.files]
        tensors = read_ahead(names, places, num_workers=num_workers)
        for group in self.groups:
            yield group, self.convert(group, [next(tensors) for _ in group.files])

    def convert(self, group: Group, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's tensors of a group, by name."""
        if group.converter is None:
            [tensor] = tensors
            return {group.target: tensor}
        converter = deepcopy(group.converter)
        for (name, pattern), tensor in zip(group.files.items(), tensors, strict=True):
            converter.add_tensor(group.target, name, pattern, tensor)
        return self._run(converter, group.target)

    def revert(self, group: Group, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of a group as the files store them, by name; the inverse of `convert`."""
        if group.converter is None:
            [tensor], [name] = tensors.values(), group.files
            return {name: tensor}
        reverse = group.converter.reverse_transform()
        first = ""
        for name, tensor in tensors.items():
            renamed, pattern = reverse.rename_source_key(name)
            first = first or renamed
            reverse.add_tensor(first, name, pattern, tensor)
        found = self._run(reverse, first)
        by_name = {self._rename(name): name for name in group.files}
        if found.keys() != by_name.keys():
            raise UserError(
                f"The weights of {type(self.model).__name__} cannot be written in the layout of its files.",
                why=f"transformers would write {', '.join(sorted(found))[:200]}, but the files contain "
                f"{', '.join(sorted(by_name))[:200]}.",
                do="load the model with transformers, save it with save_pretrained, and use that folder",
            )
        return {by_name[name]: tensor for name, tensor in found.items()}

    def _run(self, transform: Any, first: str) -> dict[str, torch.Tensor]:
        found = transform.convert(first, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}

    def _group(self, names: Iterable[str]) -> list[Group]:
        groups: dict[str, Group] = {}
        for name in sorted(names, key=natural_key):
            target, pattern, converter = self._target(name)
            group = groups.setdefault(target, Group(target=target, files={}, converter=converter))
            group.files[name] = pattern
        return [groups[target] for target in sorted(groups)]

    def _target(self, name: str) -> tuple[str, str | None, Any]:
        """Return the model's name for a tensor of the files, and the converter with its matching pattern."""
        renamed = self._rename(name)
        target, pattern, converter = renamed, None, None
        for candidate in self._converters:
            target, pattern = candidate.rename_source_key(renamed)
            if pattern is not None:
                converter = candidate
                break
        target = self._with_prefix(target)
        if target not in self._expected and self._with_prefix(name) in self._expected:
            return self._with_prefix(name), None, None  # written under the model's own names
        return target, pattern, converter

    def _rename(self, name: str) -> str:
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def _with_prefix(self, name: str) -> str:
        """Add or remove the prefix of the base model if the model's name differs in it."""
        prefix = f"{getattr(self.model, 'base_model_prefix', '')}."
        if name in self._expected or prefix == ".":
            return name
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return other if other in self._expected else name


def _transforms(model: nn.Module) -> list[Any]:
    """Return transformers' conversions for a model; there are none before version 5."""
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return []
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def read_layout(
    model: Any,
    places: Mapping[str, Place],
    expansion: Expansion | None,
    folder: Path,
    *,
    held: Set[str] = frozenset(),
) -> FileLayout:
    """Return the layout of a folder's files; raise unless they contain exactly the model's tensors, with matching shapes.

    Tied weights may be missing. `held` names the tensors that are stored quantized.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = set(
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    )
    layout = FileLayout(model, places, ignored=_ignored(model))
    names = layout.shapes({name: place.shape for name, place in places.items()}).keys() | held
    found = {target for name in names for target in _targets(name, expansion)}
    missing, extra = sorted(expected.keys() - found - tied), sorted(found - expected.keys())
    if expansion is not None and not (layout.is_plain and any(expansion.is_new(name) for name in found)):
        raise UserError(
            f"llama_pro cannot add blocks to {type(model).__name__}.",
            why="its blocks are not in a list named layers, or transformers renames or stacks their tensors.",
            do="use --train_type lora or full",
        )
    if extra:
        raise UserError(
            f"{type(model).__name__} is not supported with a quantized base or with new blocks.",
            why=f"{folder} contains {len(extra)} tensors that the model does not have, such as {extra[0]}.",
            do="use --train_type lora, dora or full: they load the model with transformers",
        )
    check_missing(folder, missing)
    wrong = [
        (target, place.shape, expected[target])
        for name, place in sorted(places.items())
        for target in _targets(name, expansion)
        if target in expected and expected[target] != place.shape
    ]
    if wrong:
        raise shape_error(folder, wrong)
    return layout


def _targets(name: str, expansion: Expansion | None) -> list[str]:
    return [target for target, _ in expansion.names(name)] if expansion is not None else [name]


def _ignored(model: Any) -> re.Pattern[str]:
    """Return a pattern for tensors of older transformers versions that models ignore."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return re.compile("|".join([r"rotary_emb\.inv_freq$", *patterns]))


def check_missing(folder: Path, missing: Sequence[str]) -> None:
    if missing:
        raise UserError(
            f"The files in {folder} lack {len(missing)} of the model's tensors, such as {missing[0]}.",
            do="download the model again",
        )


def shape_error(folder: Path, wrong: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> UserError:
    """Return the error for tensors (name, shape in the files, shape by config.json) of wrong shape."""
    name, stored, wanted = wrong[0]
    return UserError(
        f"The files in {folder} do not match its config.json.",
        why=f"{len(wrong)} tensors have unexpected shapes, such as {name}: {list(stored)} in the files, {list(wanted)} by "
        "config.json.",
        do="fetch the model again, or correct config.json",
    )
