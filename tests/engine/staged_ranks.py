"""Compare the collectives of the staged backend with plain gloo, and a training over each, in one rank.

Started by test_staged_backend.py; arguments: the device, and `stage_host` to copy host tensors too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from crosstune.torch_engine.sharding.staged_backend import register_staged_backend

Sum, Mean = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(17 * dist.get_rank() + seed)
    values = torch.randn(shape, generator=generator) * 3
    if (
        dist.get_world_size() > 2
    ):  # three numbers can be added in several orders: take some that need no rounding
        values = values.round()
    return values.to(dtype).to(device)


def gloo_result(expected: Callable[[], Any]) -> Any:
    """Return what plain gloo gives; None for a collective that the gloo of this torch lacks."""
    try:
        return as_numbers(expected())
    except RuntimeError as error:
        if "does not support" not in str(error):
            raise
        return None


def collectives(device: str, group: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    new = {"device": device}

    def reduced(op: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = draw(5, 3, dtype=dtype, **new)
        dist.all_reduce(tensor, op=op, group=group)
        return tensor

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64):
        yield f"all_reduce {dtype}", lambda dtype=dtype: reduced(Sum, dtype)
    for op in (Mean, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        yield f"all_reduce {op}", lambda op=op: reduced(op, torch.float32)

    def strided() -> torch.Tensor:
        tensor = draw(4, 6, **new).t()
        dist.all_reduce(tensor, group=group)
        return tensor

    yield "all_reduce of a view", strided

    def coalesced() -> list[torch.Tensor]:
        tensors = [draw(3, seed=1, **new), draw(2, 2, seed=2, **new)]
        dist.all_reduce_coalesced(tensors, group=group)
        return tensors

    yield "all_reduce_coalesced", coalesced

    def sent_to_all() -> torch.Tensor:
        tensor = draw(4, 2, **new)
        dist.broadcast(tensor, src=1, group=group)
        return tensor

    yield "broadcast", sent_to_all

    def gathered(dtype: torch.dtype) -> list[torch.Tensor]:
        into = torch.empty(size * 3, 2, dtype=dtype, **new)
        dist.all_gather_into_tensor(into, draw(3, 2, dtype=dtype, **new), group=group)
        parts = [torch.empty(3, 2, dtype=dtype, **new) for _ in range(size)]
        dist.all_gather(parts, draw(3, 2, dtype=dtype, **new), group=group)
        return [into, *parts]

    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.bool):
        yield f"all_gather {dtype}", lambda dtype=dtype: gathered(dtype)

    def scattered(op: Any, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        own = torch.empty(2, 3, dtype=dtype, **new)
        dist.reduce_scatter_tensor(own, draw(size * 2, 3, dtype=dtype, **new), op=op, group=group)
        return [own]

    yield "reduce_scatter", lambda: scattered(Sum)
    yield "reduce_scatter mean", lambda: scattered(Mean)
    yield "reduce_scatter bf16", lambda: scattered(Sum, torch.bfloat16)

    def asynchronous() -> list[torch.Tensor]:
        tensors = [draw(100, seed=n, **new) for n in range(3)]
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        works[0].wait()
        works[0].wait()
        value = works[1].get_future().wait()
        while not works[2].is_completed():
            pass
        assert torch.equal(value[0], tensors[1])
        return tensors

    yield "async", asynchronous

    def managed() -> list[torch.Tensor]:
        from torch.distributed.distributed_c10d import _coalescing_manager

        outputs = [torch.empty(size * 2, **new), torch.empty(size * 3, **new)]
        with _coalescing_manager(group, async_ops=False):
            dist.all_gather_into_tensor(outputs[0], draw(2, **new), group=group)
            dist.all_gather_into_tensor(outputs[1], draw(3, **new), group=group)
        return outputs

    yield "coalescing manager", managed

    def as_functions() -> list[torch.Tensor]:
        return [
            functional.all_reduce(draw(4, **new), "sum", group) + 0,
            functional.all_gather_tensor(draw(4, 2, **new), 0, group) + 0,
            functional.reduce_scatter_tensor(draw(size * 2, **new), "sum", 0, group) + 0,
        ]

    yield "functional", as_functions

    def objects() -> list[torch.Tensor]:
        found: list[Any] = [None] * size
        dist.all_gather_object(found, {"rank": rank}, group=group)
        assert [entry["rank"] for entry in found] == list(range(size))
        dist.barrier(group=group)
        return []

    yield "objects", objects

    def subgroup() -> torch.Tensor:
        smaller = dist.new_group(list(range(1, size)), backend=dist.get_backend(group))
        tensor = draw(3, **new)
        if rank:
            dist.all_reduce(tensor, group=smaller)
        return tensor

    yield "subgroup", subgroup


def train(device: str, group: Any) -> list[float]:
    """Train a small model with FSDP2 and return its losses and gradient norms."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.GELU()) for _ in range(4)), nn.Linear(33, 5))
    mesh = DeviceMesh.from_group(group, device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step % 2 + 2 * dist.get_rank())
        x = torch.randn(6, 33, generator=generator).to(device)
        loss = (model(x) - x[:, :5]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        both = loss.detach().clone()
        dist.all_reduce(both, group=group)
        numbers += [float(both), float(norm.full_tensor())]
    assert numbers[-2] < numbers[0]
    return numbers


def as_numbers(result: Any) -> list[list[int]]:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return [tensor.cpu().contiguous().view(-1).view(torch.uint8).tolist() for tensor in tensors]


def main(device: str, stage_host: str = "") -> None:
    """Print the number of collectives that were compared."""
    register_staged_backend(stage_host=bool(stage_host))
    if device == "cuda":
        torch.cuda.set_device(0)  # all ranks share the one device
    dist.init_process_group("gloo")
    plain, staged = dist.group.WORLD, dist.new_group(backend="staged")
    count = 0
    for (name, expected), (_, found) in zip(
        collectives("cpu", plain), collectives(device, staged), strict=True
    ):
        reference = gloo_result(expected)
        if reference is not None:
            assert as_numbers(found()) == reference, name
            count += 1
    losses, expected_losses = train(device, staged), train("cpu", plain)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
    assert worst <= (0 if device == "cpu" else 1e-5), (losses, expected_losses)
    if dist.get_rank() == 0:
        print(f"{count} collectives are equal; training differs by {worst}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
