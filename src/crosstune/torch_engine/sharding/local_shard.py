"""Find the shard of a parameter on this rank, gather whole tensors, and find the blocks of a model."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renamed it and deprecated the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, kw_only=True)
class Part:
    """The rows of a parameter on a rank. The first dimension is divided into equal chunks; the last ranks may have fewer
    rows, or none."""

    shape: tuple[int, ...]
    """The shape of the whole parameter."""
    num_parts: int
    number: int
    group: Any
    """The ranks with the other parts."""
    device: torch.device
    """The device of the collectives; an offloaded parameter is on the host."""

    @property
    def chunk(self) -> int:
        return -(-self.shape[0] // self.num_parts)

    @property
    def rows(self) -> slice:
        start = min(self.number * self.chunk, self.shape[0])
        return slice(start, min(start + self.chunk, self.shape[0]))

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """Gather the whole tensor from all ranks, on the device of the collectives. Collective: every rank must call it."""
        padded = local.new_zeros((self.chunk, *self.shape[1:]), device=self.device)
        padded[: local.shape[0]] = local
        whole = padded.new_empty((self.num_parts * self.chunk, *self.shape[1:]))
        _all_gather(whole, padded, group=self.group)
        return whole[: self.shape[0]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor as a view; the tensor itself if it is not sharded."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor for isinstance would take seconds
    return tensor if to_local is None else to_local()


def is_sharded(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "to_local")


def part_of(tensor: Any) -> Part | None:
    """Return the rows of a tensor on this rank; None if it is not sharded."""
    if not is_sharded(tensor):
        return None
    mesh = tensor.device_mesh
    [dim] = [number for number, placement in enumerate(tensor.placements) if placement.is_shard()]
    index = torch.get_device_module(mesh.device_type).current_device() if mesh.device_type != "cpu" else None
    return Part(
        shape=tuple(tensor.shape),
        num_parts=mesh.size(dim),
        number=mesh.get_local_rank(dim),
        group=mesh.get_group(dim),
        device=torch.device(mesh.device_type, index),
    )


def whole(tensor: torch.Tensor, *, of: torch.Tensor | None = None) -> torch.Tensor:
    """Gather a sharded tensor, or local tensors that are divided like `of`. Collective: every rank must call it."""
    part = part_of(tensor if of is None else of)
    local = local_part(tensor.detach())
    return local if part is None else part.gather(local)


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), "set_requires_gradient_sync")]


def free_gathered(model: nn.Module) -> None:
    """Free the gathered parameters of all modules; the next pass gathers them again."""
    for module in sharded_modules(model):
        module.reshard()


def set_gradient_sync(model: nn.Module, reduces: bool) -> None:
    """Make the next backward pass reduce gradients across the ranks, or only accumulate them."""
    for module in sharded_modules(model)[:1]:  # the root passes it on
        module.set_requires_gradient_sync(reduces)


def without_gradients(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Turn autograd off. FSDP2 reuses its gather buffers, so they must not be created in inference mode."""
    return torch.no_grad() if sharded_modules(model) else torch.inference_mode()


def find_blocks(model: nn.Module, *, fewest: int = 2) -> dict[str, nn.Module]:
    """Return the blocks of a model by name: the members of its outermost lists of at least `fewest` modules of one class.

    A decoder keeps its blocks in such a list.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return {
        f"{name}.{number}": block
        for name, blocks in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists) and _is_repeated(blocks, fewest)
        for number, block in enumerate(blocks)
    }


def _is_repeated(blocks: nn.ModuleList, fewest: int) -> bool:
    """Return True for a list of enough modules of one class with parameters and a forward() method."""
    kinds = {type(block) for block in blocks}
    return (
        len(blocks) >= fewest
        and len(kinds) == 1
        and kinds.pop().forward is not nn.Module.forward
        and all(any(True for _ in block.parameters()) for block in blocks)
    )
