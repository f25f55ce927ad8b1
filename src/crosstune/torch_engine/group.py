"""Connect the processes of a run through torch.distributed: a gloo group for control, another for the device."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from crosstune.config.load import add_variables
from crosstune.config.time_limits import nccl_variables
from crosstune.process.ranks import BoardLost, Group, Limits, Ranks, RankState
from crosstune.torch_engine.sharding.rendezvous import (
    join_store,
    peer_errors,
    second_connection,
    shared_store,
    use_interface_of,
)
from crosstune.torch_engine.sharding.staged_backend import NAME as STAGED
from crosstune.torch_engine.sharding.staged_backend import backend_for, prepare_mps

REMEMBERED = "crosstune/remembered"
"""Key of a string that survives a restart."""
_LEAVE_S = 10.0
"""Time that the rank serving the store waits for the others to leave."""


def connect(ranks: Ranks, limits: Limits | None = None) -> TorchGroup:
    """Connect to the other processes within the time limit."""
    limits = limits if limits is not None else Limits()
    store = join_store(ranks, limits)
    use_interface_of(ranks, store)
    return TorchGroup(ranks, store=store, limits=limits)


class StoreBoard:
    """The states of all ranks, kept in the store. Uses a second connection, since the main thread may block the first."""

    def __init__(self, store: dist.Store, *, size: int, timeout_s: float) -> None:
        self._store, self._size = store, size
        self._seen: set[int] = set()
        self._store.set_timeout(timedelta(seconds=timeout_s))

    def post(self, state: RankState) -> None:
        try:
            self._store.set(f"state/{state.rank}", state.to_text())
        except RuntimeError as error:
            raise BoardLost(str(error)) from error

    def read(self) -> dict[int, RankState]:
        try:
            new = [rank for rank in range(self._size) if rank not in self._seen]
            self._seen |= {rank for rank in new if self._store.check([f"state/{rank}"])}
            ranks = sorted(self._seen)
            texts = self._store.multi_get([f"state/{rank}" for rank in ranks]) if ranks else []
        except RuntimeError as error:
            raise BoardLost(str(error)) from error
        return {rank: RankState.from_text(text.decode()) for rank, text in zip(ranks, texts, strict=True)}


class TorchGroup(Group):
    """The ranks of a torch run. Control messages use a separate gloo group, so that they never wait for a device."""

    def __init__(self, ranks: Ranks, *, store: dist.Store, limits: Limits) -> None:
        super().__init__()
        self.ranks, self.limits, self.store = ranks, limits, store
        self._has_default, self._timeout = False, timedelta(seconds=limits.collective_s)
        with peer_errors(ranks, doing="connecting to the other processes"):
            self._control = dist.ProcessGroupGloo(
                dist.PrefixStore("control", store), ranks.rank, ranks.size, self._timeout
            )

    def gather(self, data: bytes) -> list[bytes]:
        if not data:
            return [b""] * self.ranks.size
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.ranks.size)]
        with peer_errors(self.ranks, doing="a message to all processes"):
            self._control.allgather([parts], [own]).wait()
        return [part.numpy().tobytes() for part in parts]

    def open_devices(self, device: torch.device, *, collective: str | None = None) -> None:
        """Make torch's default group, for tensors of `device` and of the host.

        `collective` is the plan's collective backend; None means the default of the device.
        """
        if device.type == "mps":  # staged through the host
            prepare_mps()
            collective = None
        name = collective or backend_for(device.type)
        serves_all = device.type == "cpu" or name == STAGED
        backend = name if serves_all else f"cpu:gloo,{device.type}:{name}"
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
                timeout=self._timeout,
                device_id=device if name == "nccl" and device.index is not None else None,
            )
        self._has_default = True

    def open_board(self) -> StoreBoard:
        store = dist.PrefixStore(
            f"crosstune/{self.ranks.attempt}/board", second_connection(self.ranks, self.limits)
        )
        return StoreBoard(store, size=self.ranks.size, timeout_s=self.limits.collective_s)

    def remember(self, text: str) -> None:
        if self.ranks.first and not self.ranks.serves_store:
            shared_store(self.store).set(REMEMBERED, text)

    def recall(self) -> str:
        store, text = shared_store(self.store), ""
        if self.ranks.first and not self.ranks.serves_store and store.check([REMEMBERED]):
            text = store.get(REMEMBERED).decode()
        return self.broadcast(text)

    def close(self) -> None:
        """Destroy the default group unless another program made it. The rank that serves the store leaves last: the others may
        still connect to each other through it."""
        if self._has_default and dist.is_initialized():
            dist.destroy_process_group()
        self._has_default = False
        until = time.monotonic() + _LEAVE_S
        with contextlib.suppress(RuntimeError):  # the server is gone
            num_left = self.store.add("left", 1)
            while self.ranks.serves_store and num_left < self.ranks.size and time.monotonic() < until:
                time.sleep(0.02)
                num_left = self.store.add("left", 0)
