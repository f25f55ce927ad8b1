"""Let rank 0 read whole tensors of a sharded model while the other ranks serve their shards."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from crosstune.process.ranks import Group
from crosstune.torch_engine.loading.adapters import Adapted, AdaptedLinear
from crosstune.torch_engine.sharding.local_shard import free_gathered, sharded_modules, whole
from crosstune.torch_engine.sharding.shard import original_dtypes

_END = ""
"""Sent instead of a name at the end."""
MODEL, TRAINED, MERGED = "model", "trained", "merged"


class Reader(Mapping[str, Any]):
    """Sharded tensors by name, gathered when they are read. The other ranks call `Gather.serve`."""

    def __init__(self, kind: str, tensors: Mapping[str, Any], gather: Gather) -> None:
        self._kind, self._tensors, self._gather = kind, tensors, gather

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise KeyError(name)
        return self._gather.read(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class Gather:
    """The tensors of a sharded model, by kind and name."""

    def __init__(
        self,
        group: Group,
        model: nn.Module,
        trained: Mapping[str, tuple[Any, Any]],
        merged: Mapping[str, Adapted],
    ) -> None:
        self.group, self._dtypes = group, original_dtypes(model)
        self._merged = _Merged(model, merged)
        # Each tensor with a parameter that is sharded in the same way.
        self.tensors: dict[str, Mapping[str, tuple[Any, Any]]] = {
            MODEL: {name: (tensor, tensor) for name, tensor in model.state_dict().items()},
            TRAINED: trained,
        }

    def reader(self, kind: str) -> Reader:
        return Reader(kind, self.tensors[kind], self)

    def read(self, kind: str, name: str) -> torch.Tensor:
        """Gather a tensor; called by rank 0."""
        self.group.share(f"{kind}/{name}")
        return self._gather(kind, name)

    def serve(self) -> None:
        """Join the collectives of rank 0's reads until it ends; called by the other ranks."""
        while (request := self.group.share("")) != _END:
            kind, _, name = request.partition("/")
            self._gather(kind, name)
        self._merged.end()

    def end(self) -> None:
        self.group.share(_END)
        self._merged.end()

    def _gather(self, kind: str, name: str) -> torch.Tensor:
        if kind == MERGED:
            return self._merged.read(name)
        tensor, divided_like = self.tensors[kind][name]
        found = whole(tensor, of=divided_like)
        return found.to(self._dtypes.get(name, found.dtype)) if kind == MODEL else found


class _Merged:
    """Adapters of a sharded model, merged on request. The FSDP unit of an adapter stays gathered until an adapter of
    another unit is read."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapted]) -> None:
        self._model, self.adapters = model, adapters
        self._plain = {n: a.merged for n, a in adapters.items() if isinstance(a, AdaptedLinear)}
        self._units: dict[nn.Module, Any] = {}
        for unit in sharded_modules(model):  # outer modules first
            self._units |= dict.fromkeys(unit.modules(), unit)
        self._gathered: Any = None

    def read(self, name: str) -> torch.Tensor:
        unit = self._units[self.adapters[name]]
        if unit is not self._gathered:
            free_gathered(self._model)
            unit.unshard()
            self._gathered = unit
        with torch.no_grad():
            return self._plain[name]()

    def end(self) -> None:
        free_gathered(self._model)


@contextlib.contextmanager
def read_whole(
    group: Group,
    model: nn.Module,
    trained: Mapping[str, tuple[Any, Any]],
    *,
    merged: Mapping[str, Adapted] | None = None,
) -> Iterator[Mapping[str, torch.Tensor] | None]:
    """Yield the whole trained tensors on rank 0; on the others serve its reads, then yield None.

    On rank 0 `model.state_dict()` returns whole tensors, and `merged()` of the adapters in `merged` works.
    """
    gather = Gather(group, model, trained, merged or {})
    if not group.ranks.first:
        gather.serve()
        yield None
        return
    target: Any = model
    target.state_dict = lambda: gather.reader(MODEL)
    adapters: Mapping[str, Any] = merged or {}
    for name, adapter in adapters.items():
        adapter.merged = functools.partial(gather.read, MERGED, name)
    try:
        yield gather.reader(TRAINED)
    finally:
        del target.state_dict
        for adapter in adapters.values():
            del adapter.merged
        gather.end()
