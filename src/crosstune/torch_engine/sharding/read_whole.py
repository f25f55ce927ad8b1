"""Let rank 0 read whole tensors of a sharded model while the other ranks serve their shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from crosstune.process.ranks import Group
from crosstune.torch_engine.loading.adapters import Adapted, AdaptedLinear
from crosstune.torch_engine.sharding.local_shard import free_gathered, sharded_modules, whole
from crosstune.torch_engine.sharding.shard import original_dtypes

MODEL, TRAINED, MERGED = "model", "trained", "merged"


class Reader(Mapping[str, Any]):
    """Tensors by name, gathered when they are read."""

    def __init__(self, names: Collection[str], read: Callable[[str], torch.Tensor]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Gather:
    """Gathers the tensors of a sharded model, and merges adapters. All ranks make the same calls."""

    def __init__(
        self, model: nn.Module, trained: Mapping[str, tuple[Any, Any]], adapters: Mapping[str, Adapted]
    ) -> None:
        self.model, self.trained, self.adapters = model, trained, adapters
        self.tensors, self._dtypes = model.state_dict(), original_dtypes(model)
        self._plain = {n: a.merged for n, a in adapters.items() if isinstance(a, AdaptedLinear)}
        self._units: dict[nn.Module, Any] = {}
        for unit in sharded_modules(model):  # outer modules first
            self._units |= dict.fromkeys(unit.modules(), unit)
        self._gathered: Any = None

    def __call__(self, request: str) -> torch.Tensor:
        kind, _, name = request.partition("/")
        if kind == MERGED:
            return self._merge(name)
        if kind == TRAINED:
            tensor, divided_like = self.trained[name]
            return whole(tensor, of=divided_like)
        found = whole(self.tensors[name])
        return found.to(self._dtypes.get(name, found.dtype))

    @torch.no_grad()
    def _merge(self, name: str) -> torch.Tensor:
        """Merge an adapter. Its FSDP unit stays gathered until an adapter of another unit is read."""
        unit = self._units[self.adapters[name]]
        if unit is not self._gathered:
            free_gathered(self.model)
            unit.unshard()
            self._gathered = unit
        return self._plain[name]()


@contextlib.contextmanager
def read_whole(
    group: Group,
    model: nn.Module,
    trained: Mapping[str, tuple[Any, Any]],
    *,
    merged: Mapping[str, Adapted] | None = None,
) -> Iterator[Mapping[str, torch.Tensor] | None]:
    """Yield the whole trained tensors on rank 0; on the others serve its reads, then yield None.

    On rank 0 `model.state_dict()` returns whole tensors, and `merged()` of the adapters in `merged` works. `trained` has each
    tensor with a parameter that is sharded in the same way.
    """
    adapters: Mapping[str, Any] = merged or {}
    gather = _Gather(model, trained, adapters)
    if not group.ranks.first:
        while request := group.broadcast(""):  # empty at the end
            gather(request)
        free_gathered(model)
        yield None
        return

    def read(kind: str, name: str) -> torch.Tensor:
        return gather(group.broadcast(f"{kind}/{name}"))

    target: Any = model
    target.state_dict = lambda: Reader(gather.tensors, functools.partial(read, MODEL))
    for name, adapter in adapters.items():
        adapter.merged = functools.partial(read, MERGED, name)
    try:
        yield Reader(trained, functools.partial(read, TRAINED))
    finally:
        del target.state_dict
        for adapter in adapters.values():
            del adapter.merged
        group.broadcast("")
        free_gathered(model)
