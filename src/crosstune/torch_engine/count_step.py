"""Count the memory and the collectives of torch code as it runs, on real tensors or on fake ones without values."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from crosstune.core.profiling import FORWARD, no_phase
from crosstune.estimate.rehearsal import Collective, Rehearsal
from crosstune.torch_engine.sharding.local_shard import is_sharded, local_part

if TYPE_CHECKING:
    from crosstune.torch_engine.session.session import TorchSession

_KINDS = {
    "allgather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "all_gather": "all-gather",
}
"""Part of the name of torch's operator -> its kind."""


class CountStep(TorchDispatchMode):
    """Count the bytes of storages that exist, their peak, and the collectives, in its `with` block.

    Reading a value of a fake tensor, which has none, gives 1.
    """

    def __init__(self, *, num_local: int) -> None:
        super().__init__()
        self.held_bytes = self.peak_bytes = 0
        self._num_local = num_local
        self._sizes: dict[int, int] = {}
        self._calls: Counter[tuple[str, int, int, bool]] = Counter()

    def __enter__(self) -> CountStep:
        self._resizing = _watch_resizes(self._resize)
        self._resizing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._resizing.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # DTensor then calls the operators of its shard, which come here
        if func.namespace == "c10d":
            self._count_call(func, args)
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            return 1.0 if args[0].is_floating_point() else 1
        out = func(*args, **(kwargs or {}))
        self.add(each for each in tree_iter(out) if isinstance(each, torch.Tensor))
        return out

    def add(self, tensors: Iterable[torch.Tensor]) -> int:
        """Count tensors, each storage once; return the bytes that are new."""
        before = self.held_bytes
        for tensor in tensors:
            storage = local_part(tensor).untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                self._sizes[key] = 0
                weakref.finalize(storage, self._free, key)
                self._resize(key, storage.nbytes())
        return self.held_bytes - before

    def restart_peak(self) -> int:
        """Return the peak since the last call."""
        peak, self.peak_bytes = self.peak_bytes, self.held_bytes
        return peak

    def collectives(self) -> list[Collective]:
        return [
            Collective(kind=kind, num_bytes=num_bytes, times=times, num_ranks=num_ranks, across_nodes=across)
            for (kind, num_bytes, num_ranks, across), times in sorted(self._calls.items())
        ]

    def _resize(self, key: int, num_bytes: int) -> None:
        if key in self._sizes:
            self.held_bytes += num_bytes - self._sizes[key]
            self._sizes[key] = num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _free(self, key: int) -> None:
        self.held_bytes -= self._sizes.pop(key)

    def _count_call(self, func: Any, args: Any) -> None:
        name = func._schema.name.removeprefix("c10d::").strip("_")
        kind = next((kind for part, kind in _KINDS.items() if part in name), name)
        num_bytes = max(
            (each.nbytes for each in tree_iter(args) if isinstance(each, torch.Tensor)), default=0
        )
        ranks = _ranks_of(args)
        nodes = {rank // self._num_local for rank in ranks}
        self._calls[kind, num_bytes, len(ranks), len(nodes) > 1] += 1


def _ranks_of(args: Any) -> list[int]:
    """Return the ranks of a collective; its group is one of the arguments of the operator."""
    for each in args:
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.get_process_group_ranks(dist.ProcessGroup.unbox(each))
    return list(range(dist.get_world_size()))


def _is_fake(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


@contextlib.contextmanager
def _watch_resizes(on_resize: Any) -> Iterator[None]:
    """Report new sizes of storages: FSDP2 frees gathered parameters by resizing them, which no operator shows."""
    resize = torch.UntypedStorage.resize_

    def resize_and_report(storage: Any, num_bytes: int) -> Any:
        out = resize(storage, num_bytes)
        on_resize(storage._cdata, num_bytes)
        return out

    torch.UntypedStorage.resize_ = resize_and_report
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize


def count_first_step(
    session: TorchSession,
    backward: Callable[[], object],
    counter: CountStep,
    *,
    on_phase: Callable[[str], None] = lambda name: None,
) -> Rehearsal:
    """Run `backward` and the first update of an opened session, and count them."""
    masters = session.masters
    weights = counter.add([*session.model.parameters(), *session.model.buffers(), *masters.masters.values()])
    activations = 0

    @contextlib.contextmanager
    def watch(name: str) -> Iterator[None]:
        nonlocal activations
        on_phase(name)
        before = counter.held_bytes
        yield
        if name == FORWARD:
            activations = max(activations, counter.held_bytes - before)

    session.phase = watch
    with counter:
        backward()
        gradients = sum(
            tensor.grad.nbytes if not is_sharded(tensor.grad) else local_part(tensor.grad).nbytes
            for tensor in {*masters.masters.values(), *masters.parameters.values()}
            if tensor.grad is not None
        )
        in_passes, before = counter.restart_peak(), counter.held_bytes
        session.update(lr=1e-6)
        optimizer = counter.held_bytes - before + gradients
        in_update = counter.restart_peak()
    session.phase = no_phase
    return Rehearsal(
        num_ranks=session.parallel.size if session.parallel is not None else 1,
        parameters=session.num_parameters()[1],
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        peak=max(in_passes + optimizer, in_update),
        collectives=counter.collectives(),
    )
