"""Run collectives on devices without a collective backend, such as MPS: through host memory, with gloo.

The process group copies inputs to the host, runs gloo there, and copies results back when the caller waits. Host tensors
are passed to gloo directly. FSDP2 also expects streams, device selection and copy kernels, which `prepare_mps` adds to
torch.mps: its one Metal queue runs in order, so a stream only records events.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Work


class StagedWork(Work):
    """One collective: gloo's works, their host buffers, and the tensors that hold the results after `wait`.

    Contiguous host tensors are their own buffers, unless `stage_host` is set. With a `divisor`, the results are divided by it.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], *, stage_host: bool, divisor: int | None = None
    ) -> None:
        super().__init__()
        self.works: list[Any] = []
        self._outputs, self._stage_host, self._divisor = list(outputs), stage_host, divisor
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._results: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._is_done = False

    def to_host(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """Return an input of the collective, contiguous on the host. Waits for the device."""
        return tensor.detach().to("cpu", copy=copy or self._stage_host).contiguous()

    def from_host(self, tensor: torch.Tensor, *, in_place: bool = False) -> torch.Tensor:
        """Return a host buffer for an output, copied to `tensor` by `wait`. A collective in place also reads the buffer."""
        if not self._stage_host and tensor.device.type == "cpu" and tensor.is_contiguous():
            host = tensor.detach()
        else:
            host = (
                self.to_host(tensor, copy=True) if in_place else torch.empty(tensor.shape, dtype=tensor.dtype)
            )
            self._pending.append((host, tensor.detach()))
        self._results.append(host)
        return host

    def wait(self, *timeout: Any, **named: Any) -> bool:
        """Wait for gloo and, in the first call, copy the results, blocking, so that any stream may read them. Raises the errors
        of gloo."""
        with self._lock:
            if not self._is_done:
                for work in self.works:
                    work.wait(*timeout, **named)
                if self._divisor is not None:
                    for host in self._results:
                        host.div_(self._divisor)
                for host, tensor in self._pending:
                    tensor.copy_(host.view(tensor.shape))
                self._pending.clear()
                self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Return True if the results are in place; copy them if gloo has finished."""
        if not self._is_done and all(work.is_completed() for work in self.works):
            self.wait()
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a completed future: a copy from another thread could be late for its reader."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def as_bytes(host: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as bytes: gloo does not support all dtypes, such as fp8 and int16."""
    return host.view(-1).view(torch.uint8)


NAME = "staged"
"""The name of the backend in init_process_group and new_group."""
_DEVICES = ("cpu", "cuda", "mps", "xpu")
_OWN_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
"""Device type -> torch's backend for it. Other devices are staged."""

Tensors = Sequence[torch.Tensor]


def backend_for(device: str) -> str:
    """Return the process-group backend for a device type; register the staged one if torch has none."""
    own = _OWN_BACKENDS.get(device)
    if own is not None and dist.is_backend_available(own):
        return own
    register_staged_backend()
    return NAME


def register_staged_backend(*, stage_host: bool = False) -> None:
    """Register the backend with torch. With `stage_host` it copies host tensors too, as tests need."""
    if NAME.upper() not in dist.Backend._plugins:
        make = partial(StagedProcessGroup, stage_host=stage_host)
        dist.Backend.register_backend(NAME, make, devices=list(_DEVICES))


class StagedProcessGroup(dist.ProcessGroup):
    """A process group over gloo for tensors of any device, with the collectives of FSDP2 and DDP.

    torch calls the methods by name, from Python and C++: `_allgather_base` until 2.11, `all_gather_single` since.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, *, stage_host: bool = False
    ) -> None:
        super().__init__(rank, size)
        self._num_ranks, self._stage_host = size, stage_host
        self._gloo = _make_gloo(store, rank, size, timeout)
        # Object collectives, shutdown and batched messages look up the backend of a device.
        for device in _DEVICES:
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        work = self._start(tensors, opts)
        for tensor in tensors:  # one call each: gloo sums the tensors of one call with each other
            host = work.from_host(tensor, in_place=True)
            work.works.append(self._gloo.allreduce([host], _reducing(c10d.AllreduceOptions(), opts)))
        return work

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        work = self._start(tensors)
        for tensor in tensors:
            work.works.append(self._gloo.broadcast([as_bytes(work.from_host(tensor, in_place=True))], opts))
        return work

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        work = self._start([tensor for tensors in output_lists for tensor in tensors])
        for tensors, given in zip(output_lists, inputs, strict=True):
            parts = [as_bytes(work.from_host(tensor)) for tensor in tensors]
            self._gather(work, parts, given, opts)
        return work

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        work = self._start(outputs)
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self._num_ranks or output.dtype != given.dtype:
                raise ValueError(
                    f"all_gather: an output of {output.numel()} x {output.dtype} does not hold "
                    f"{given.numel()} x {given.dtype} of {self._num_ranks} ranks"
                )
            parts = as_bytes(work.from_host(output)).chunk(self._num_ranks)
            self._gather(work, list(parts), given, opts)
        return work

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        run = getattr(self._gloo, "reduce_scatter_single", None) or self._gloo._reduce_scatter_base
        work = self._start(outputs, opts)
        for output, given in zip(outputs, inputs, strict=True):
            flat = work.from_host(output).view(-1), work.to_host(given).view(-1)
            work.works.append(run(*flat, _reducing(c10d.ReduceScatterOptions(), opts)))
        return work

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier(_timed(c10d.BarrierOptions(), opts))

    def _start(self, outputs: Tensors, opts: Any = None) -> StagedWork:
        divisor = self._num_ranks if _is_mean(opts) else None
        return StagedWork(outputs, stage_host=self._stage_host, divisor=divisor)

    def _gather(self, work: StagedWork, parts: list[torch.Tensor], given: torch.Tensor, opts: Any) -> None:
        own = as_bytes(work.to_host(given))
        work.works.append(self._gloo.allgather([parts], [own], _timed(c10d.AllgatherOptions(), opts)))


def _make_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Make the gloo backend; with TORCH_DISTRIBUTED_DEBUG=DETAIL, with torch's check for mismatched collectives."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    if dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return gloo
    return c10d._create_process_group_wrapper(
        wrapped_pg=gloo, store_prefix=NAME, store=store, rank=rank, world_size=size, timeout=timeout
    )


def _is_mean(opts: Any) -> bool:
    return opts is not None and opts.reduceOp == dist.ReduceOp.AVG


def _reducing(plain: Any, opts: Any) -> Any:
    """Return gloo's options for a reduction. A mean is a sum that is divided on the host: older gloo does not support means."""
    if opts is not None:
        plain.reduceOp = dist.ReduceOp.SUM if _is_mean(opts) else opts.reduceOp
    return _timed(plain, opts)


def _timed(plain: Any, opts: Any) -> Any:
    if opts is not None:
        plain.timeout = opts.timeout
    return plain


_KERNELS = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
"""FSDP2's operators -> torch's implementations for every device."""
_libraries: list[torch.library.Library] = []
"""Keeps the registrations alive: they end with their library."""


def prepare_mps() -> None:
    """Make FSDP2 work with MPS tensors, given a process group that supports them. Idempotent."""
    add_streams(torch.mps)
    register_kernels("MPS")


def add_streams(handle: Any) -> None:
    """Add missing stream and device functions to the module of a device with one queue."""

    class Stream:
        """The one queue of the device."""

        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

        def wait_stream(self, awaited: Any) -> None:
            """Do nothing: work runs in the order of submission."""

        wait_event = wait_stream

        def record_event(self, event: Any = None) -> Any:
            """Return a recorded event, on which the host can wait."""
            recorded = handle.Event() if event is None else event
            recorded.record()
            return recorded

        def synchronize(self) -> None:
            handle.synchronize()

    queue = Stream()
    additions = {
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(stream),
        "current_stream": lambda device=None: queue,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_initialized": lambda: True,
    }
    for name, value in additions.items():
        if not hasattr(handle, name):
            setattr(handle, name, value)


def register_kernels(key: str) -> None:
    """Register FSDP2's operators for a dispatch key that has none."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    for name, function in _KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", key):
            library = torch.library.Library("fsdp", "IMPL", key)
            library.impl(name, getattr(collectives, function))
            _libraries.append(library)
