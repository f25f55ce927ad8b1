"""Find the repeated blocks of a model, which are sharded and gathered one at a time."""

from __future__ import annotations

from torch import nn


def find_blocks(model: nn.Module, *, fewest: int = 2) -> dict[str, nn.Module]:
    """Return the blocks of a model by name: the members of its outermost lists of `fewest` or more modules of one class.

    A decoder's blocks are such a list, whatever the model calls it. A model without one has no blocks and is sharded
    as a whole.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return {
        f"{name}.{number}": block
        for name, blocks in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists) and _is_repeated(blocks, fewest)
        for number, block in enumerate(blocks)
    }


def _is_repeated(blocks: nn.ModuleList, fewest: int) -> bool:
    """Return whether a list holds so many modules of one class with parameters, each with a forward of its own."""
    kinds = {type(block) for block in blocks}
    return (
        len(blocks) >= fewest
        and len(kinds) == 1
        and "forward" in {name for kind in kinds for base in kind.__mro__[:-2] for name in vars(base)}
        and all(any(True for _ in block.parameters()) for block in blocks)
    )
