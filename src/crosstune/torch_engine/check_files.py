"""Check that the tensors in the files of a model are those that its config asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from torch import nn

from crosstune.core.errors import UserError
from crosstune.torch_engine.blocks import Expansion
from crosstune.torch_engine.file_layout import FileLayout
from crosstune.torch_engine.stream import Place


def read_layout(
    model: Any,
    places: Mapping[str, Place],
    expansion: Expansion | None,
    folder: Path,
    *,
    held: Set[str] = frozenset(),
) -> FileLayout:
    """Return how the files' tensors become the model's. Raise unless they are all there and no others; tied weights may
    be missing. `held` are the model's tensors that are stored quantized."""
    expected = set(model.state_dict().keys())
    tied = set(
        getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    )
    layout = FileLayout(model, places, ignored=_ignored(model))
    names = layout.shapes({name: place.shape for name, place in places.items()}).keys() | held
    found = {
        target for name in names for target, _ in (expansion.names(name) if expansion else [(name, False)])
    }
    missing, extra = sorted(expected - found - tied), sorted(found - expected)
    if expansion is not None and not any(expansion.is_new(name) for name in found):
        raise UserError(
            f"llama_pro cannot add blocks to {type(model).__name__}.",
            why="its blocks are not in a list named layers.",
            do="use --train_type lora or full",
        )
    if extra:
        raise UserError(
            f"{type(model).__name__} is not supported with a quantized base or with new blocks.",
            why=f"{folder} holds {len(extra)} tensors under names that the model in memory does not have, such as {extra[0]}.",
            do="use --train_type lora, dora or full, which load the model with transformers",
        )
    if expansion is not None and not layout.is_plain:
        raise UserError(
            f"llama_pro cannot add blocks to {type(model).__name__}.",
            why=f"the model in memory holds tensors of {folder} under other names or stacked.",
            do="use --train_type lora, qlora or full",
        )
    if missing:
        raise UserError(
            f"The files in {folder} lack {len(missing)} tensors of the model, such as {missing[0]}.",
            do="fetch the model again",
        )
    return layout


def _ignored(model: Any) -> re.Pattern[str]:
    """Return a pattern for tensors that older versions of transformers wrote and that models do not load."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return re.compile("|".join([r"rotary_emb\.inv_freq$", *patterns]))


def check_shapes(
    model: nn.Module, places: Mapping[str, Place], expansion: Expansion | None, folder: Path
) -> None:
    """Check that the tensors in the files have the shapes of the model."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    wrong = [
        (target, place.shape, expected[target])
        for name, place in sorted(places.items())
        for target, _ in (expansion.names(name) if expansion else [(name, False)])
        if target in expected and expected[target] != place.shape
    ]
    if wrong:
        raise other_shapes(folder, wrong)


def other_shapes(folder: Path, wrong: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> UserError:
    """Return the error for tensors (name, shape in the files, shape by config.json) that do not fit."""
    name, stored, wanted = wrong[0]
    return UserError(
        f"The files in {folder} do not fit its config.json.",
        why=f"{len(wrong)} tensors have another shape, such as {name}: {list(stored)} in the files, {list(wanted)} by "
        "config.json.",
        do="fetch the model again, or correct config.json",
    )
