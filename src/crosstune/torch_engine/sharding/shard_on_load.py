"""Adapt and shard a model part by part, as its weights are loaded, so that no process holds all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from crosstune.torch_engine.device import give_back_freed
from crosstune.torch_engine.loading.adapters import Adapted
from crosstune.torch_engine.sharding.local_shard import find_blocks, is_sharded
from crosstune.torch_engine.sharding.parallel import Parallel
from crosstune.torch_engine.sharding.shard import shard_module, shard_root


@dataclass(kw_only=True)
class ShardOnLoad:
    """Adapt and shard a part of a model as soon as its weights are loaded. Called with each block, and with "" for the rest."""

    parallel: Parallel
    cpu_offload: bool
    choose: Callable[[nn.Module], Sequence[str]] | None
    """Return the layers of a model that get an adapter; None if the method has none."""
    adapt: Callable[[nn.Module, nn.Module, Sequence[str]], Mapping[str, Adapted]]
    """Add adapters to these layers of a model, which are in the module."""
    adapters: dict[str, Adapted] = field(default_factory=dict)
    is_done: bool = False
    _chosen: Sequence[str] | None = None

    def __call__(self, model: nn.Module, block: str) -> None:
        part = model.get_submodule(block)
        if self.choose is not None:
            if self._chosen is None:
                self._chosen = self.choose(model)
            self._add_adapters(model, part, block)
        mesh, strategy = self.parallel.mesh, self.parallel.strategy
        if block:
            shard_module(part, mesh=mesh, strategy=strategy, cpu_offload=self.cpu_offload)
        else:
            shard_root(model, mesh=mesh, strategy=strategy, cpu_offload=self.cpu_offload)
            self.is_done = True
        give_back_freed()

    def finish_all(self, model: nn.Module) -> dict[str, Adapted]:
        """Finish a model that was built at once, and return the adapters by canonical name."""
        for block in [] if self.is_done else [*find_blocks(model), ""]:
            self(model, block)
        return self.adapters

    def _add_adapters(self, model: nn.Module, part: nn.Module, block: str) -> None:
        assert self._chosen is not None
        for parameter in part.parameters():
            if not is_sharded(parameter):
                parameter.requires_grad_(False)
        names = [name for name in self._chosen if name.startswith(f"{block}.") or not block]
        found = self.adapters | dict(
            self.adapt(model, part, [name for name in names if name not in self.adapters])
        )
        self.adapters = {name: found[name] for name in self._chosen if name in found}
