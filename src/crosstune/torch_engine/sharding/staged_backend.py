"""Run collectives on devices that have no collective backend, such as MPS, through host memory over gloo.

gloo takes tensors of the host (and of CUDA) only. The process group below copies what a collective reads to the host,
runs the collective there with gloo, and copies the result back when the caller waits for it. Tensors that are on the
host already go to gloo as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from crosstune.torch_engine.sharding.staged_copies import HostCopies, as_bytes
from crosstune.torch_engine.sharding.staged_work import StagedWork

NAME = "staged"
"""The name of the backend for init_process_group and new_group, once it is registered."""
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_OWN_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""Device type -> the backend that torch brings for it. Every other device is staged."""

Tensors = Sequence[torch.Tensor]


def backend_for(device: str) -> str:
    """Return the name of the process-group backend for a device type; register ours where torch has none."""
    own = _OWN_BACKENDS.get(device)
    if own is not None and dist.is_backend_available(own):
        return own
    register_staged_backend()
    return NAME


def register_staged_backend(
    name: str = NAME, *, devices: Sequence[str] = _DEVICES, stage_host: bool = False
) -> None:
    """Make the backend known to torch under a name. `stage_host` copies host tensors too, to test the copying."""
    if name.upper() not in dist.Backend._plugins:
        make = partial(StagedProcessGroup, stage_host=stage_host)
        dist.Backend.register_backend(name, make, devices=list(devices))


class StagedProcessGroup(dist.ProcessGroup):
    """A process group over gloo for tensors of any device, with the collectives that FSDP2 and DDP use. All ranks see one
    order of collectives, as in gloo.

    Methods have the names that torch calls: those until torch 2.11 (`_allgather_base`) and those since
    (`all_gather_single`), from Python and, for DDP and functional collectives, from C++.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, *, stage_host: bool = False
    ) -> None:
        super().__init__(rank, size)
        self._num_ranks, self._stage_host = size, stage_host
        self._gloo = _make_gloo(store, rank, size, timeout)
        # Object collectives, shutdown and batches of messages look up the backend of a device.
        for device in _DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        copies = self._copies()
        hosts = [copies.both_ways(tensor) for tensor in tensors]
        # One call for each: gloo reduces several tensors of one call with each other.
        works = [self._gloo.allreduce([host], _reducing(c10d.AllreduceOptions(), opts)) for host in hosts]
        return self._finish(works, copies, tensors, mean=_is_mean(opts))

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        copies = self._copies()
        hosts = [as_bytes(copies.both_ways(tensor)) for tensor in tensors]
        return self._finish([self._gloo.broadcast([host], opts) for host in hosts], copies, tensors)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        copies = self._copies()
        works = [
            self._gloo.allgather(
                [[as_bytes(copies.from_host(tensor)) for tensor in tensors]],
                [as_bytes(copies.to_host(given))],
                _timed(c10d.AllgatherOptions(), opts),
            )
            for tensors, given in zip(output_lists, inputs, strict=True)
        ]
        return self._finish(works, copies, [tensor for tensors in output_lists for tensor in tensors])

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        copies, works = self._copies(), []
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self._num_ranks or output.dtype != given.dtype:
                raise ValueError(
                    f"all_gather: an output of {output.numel()} x {output.dtype} does not hold "
                    f"{given.numel()} x {given.dtype} of {self._num_ranks} ranks"
                )
            parts = as_bytes(copies.from_host(output)).chunk(self._num_ranks)
            own = as_bytes(copies.to_host(given))
            works.append(self._gloo.allgather([list(parts)], [own], _timed(c10d.AllgatherOptions(), opts)))
        return self._finish(works, copies, outputs)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        copies = self._copies()
        works = [
            self._reduce_scatter(copies.from_host(output), copies.to_host(given), opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._finish(works, copies, outputs, mean=_is_mean(opts))

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Any:
        """Reduce a contiguous host tensor and keep the part of this rank."""
        run = getattr(self._gloo, "reduce_scatter_single", None) or self._gloo._reduce_scatter_base
        return run(output.view(-1), given.view(-1), _reducing(c10d.ReduceScatterOptions(), opts))

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(_timed(c10d.BarrierOptions(), opts))

    def _copies(self) -> HostCopies:
        return HostCopies(stage_host=self._stage_host)

    def _finish(
        self, works: Sequence[Any], copies: HostCopies, outputs: Tensors, *, mean: bool = False
    ) -> StagedWork:
        return StagedWork(works, copies, outputs, divisor=self._num_ranks if mean else None)


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make the gloo backend; with TORCH_DISTRIBUTED_DEBUG=DETAIL, inside torch's check for mismatched collectives."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return gloo
    return c10d._create_process_group_wrapper(
        wrapped_pg=gloo, store_prefix=NAME, store=store, rank=rank, world_size=size, timeout=timeout
    )


def _is_mean(opts: Any) -> bool:
    return opts is not None and opts.reduceOp == dist.ReduceOp.AVG


def _reducing(plain: Any, opts: Any) -> Any:
    """Return gloo's options for a reduction. A mean is summed, and divided on the host: older gloo has no mean."""
    if opts is not None:
        plain.reduceOp = dist.ReduceOp.SUM if _is_mean(opts) else opts.reduceOp
    return _timed(plain, opts)


def _timed(plain: Any, opts: Any) -> Any:
    if opts is not None:
        plain.timeout = opts.timeout
    return plain
