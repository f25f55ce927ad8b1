"""Connect the processes of a run through torch.distributed: a gloo group for control, and one for the device."""

from __future__ import annotations

import hashlib
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from crosstune.config.load import add_variables
from crosstune.config.time_limits import nccl_variables
from crosstune.core.activity import Activity
from crosstune.core.ranks import Limits, Ranks, sum_exactly
from crosstune.torch_engine.board import StoreBoard
from crosstune.torch_engine.lost_peers import peer_errors
from crosstune.torch_engine.rendezvous import join_store, second_connection, shared_store, use_interface_of
from crosstune.torch_engine.sharding.mps_streams import prepare_mps
from crosstune.torch_engine.sharding.staged_backend import NAME as STAGED
from crosstune.torch_engine.sharding.staged_backend import backend_for

REMEMBERED = "crosstune/remembered"
"""The key of the text that outlives an attempt."""


class TorchGroup:
    """The processes of a run. Small messages use a separate gloo group, so they never wait for a device."""

    def __init__(self, ranks: Ranks, *, store: dist.Store, limits: Limits) -> None:
        self.ranks, self.limits, self.store = ranks, limits, store
        self.activity = Activity()
        self._has_default = False
        with peer_errors(ranks, doing="connecting to the other processes"):
            self._control = dist.ProcessGroupGloo(
                dist.PrefixStore("control", store), ranks.rank, ranks.size, _seconds(limits.collective_s)
            )

    def any(self, flag: bool) -> bool:
        return any(part != b"\0" for part in self.gather(b"\1" if flag else b"\0"))

    def same(self, text: str) -> bool:
        return len(set(self.gather(hashlib.sha256(text.encode()).digest()))) == 1

    def share(self, text: str) -> str:
        data = text.encode() if self.ranks.first else b""
        length = int(self.sum_numbers(len(data))[0])
        return self.gather(data.ljust(length, b"\0"))[0].decode()

    def meet(self) -> None:
        self.any(False)

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sum each number over the processes in double precision, bitwise equal on every rank."""
        parts = self.gather(np.array(numbers, "<f8").tobytes())
        return [
            sum_exactly(column)
            for column in zip(*(np.frombuffer(p, "<f8").tolist() for p in parts), strict=True)
        ]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process by rank; all must have the same length."""
        if not data:
            return [b""] * self.ranks.size
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.ranks.size)]
        with peer_errors(self.ranks, doing="a message to all processes"):
            self._control.allgather([parts], [own]).wait()
        return [part.numpy().tobytes() for part in parts]

    def open_devices(self, device: torch.device, *, collective: str | None = None) -> None:
        """Make the default group of torch.distributed, for the tensors of `device` and of the host.

        `collective` is the plan's communication library; None for the device's default.
        """
        name = collective_for(device, asked=collective)
        takes_all = device.type == "cpu" or name == STAGED
        backend = name if takes_all else f"cpu:gloo,{device.type}:{name}"
        if name == "nccl":
            add_variables(nccl_variables(self.limits), over=True)
        if self.limits.debug:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        with peer_errors(self.ranks, doing="opening the devices"):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("devices", self.store),
                rank=self.ranks.rank,
                world_size=self.ranks.size,
                timeout=_seconds(self.limits.collective_s),
                device_id=device if name == "nccl" and device.index is not None else None,
            )
        self._has_default = True

    def open_board(self) -> StoreBoard:
        """Return the board on which all ranks post what they do."""
        store = dist.PrefixStore(
            f"crosstune/{self.ranks.attempt}/board", second_connection(self.ranks, self.limits)
        )
        return StoreBoard(store, size=self.ranks.size, timeout_s=self.limits.collective_s)

    def remember(self, text: str) -> None:
        """Keep a text for the next attempt, where torchrun's agent has the store."""
        if self.ranks.first and not self.ranks.serves_store:
            shared_store(self.store).set(REMEMBERED, text)

    def recall(self) -> str:
        """Return what rank 0 kept in an earlier attempt; an empty text if nothing."""
        store, text = shared_store(self.store), ""
        if self.ranks.first and not self.ranks.serves_store and store.check([REMEMBERED]):
            text = store.get(REMEMBERED).decode()
        return self.share(text)

    def close(self) -> None:
        """Leave the default group, unless a program made it before us. Every process calls this, with no collective under
        way."""
        if self._has_default and dist.is_initialized():
            dist.destroy_process_group()
        self._has_default = False


def collective_for(device: torch.device, *, asked: str | None = None) -> str:
    """Return the backend of torch.distributed for a device. gloo takes no MPS tensors, so copies are staged for it."""
    if device.type == "mps":
        prepare_mps()
        return backend_for("mps")
    return asked or backend_for(device.type)


def connect(ranks: Ranks, limits: Limits | None = None) -> TorchGroup:
    """Connect to the other processes, within the limit."""
    limits = limits if limits is not None else Limits()
    store = join_store(ranks, limits)
    use_interface_of(ranks, store)
    return TorchGroup(ranks, store=store, limits=limits)


def _seconds(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)
