"""Connect the processes of a run through torch.distributed: reach the master, sign in, exchange messages, and translate errors."""

from __future__ import annotations

import contextlib
import errno
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from crosstune.config.load import add_variables
from crosstune.config.time_limits import nccl_variables
from crosstune.core.errors import PeerLost, PortTaken, UserError
from crosstune.distributed.master import check_master, is_loopback, listen, plain_address, reach
from crosstune.process.ranks import BoardLost, Group, Limits, Ranks, RankState
from crosstune.torch_engine.sharding.staged_backend import NAME as STAGED
from crosstune.torch_engine.sharding.staged_backend import backend_for, prepare_mps


def join_store(ranks: Ranks, limits: Limits) -> dist.Store:
    """Return the store of this attempt after all ranks have signed in.

    torchrun's store outlives a restart: without a prefix for each attempt, a process would read old addresses.
    """
    if ranks.num_nodes > 1:
        check_master(ranks.master_addr, node_rank=ranks.node_rank)
    deadline = time.monotonic() + limits.connect_s
    served = None
    if ranks.serves_store:
        served = _make_store(ranks, limits.connect_s, master_listen_fd=_listen(ranks).detach())
    ends = _await_master(ranks, limits)
    store = dist.PrefixStore(
        f"crosstune/{ranks.attempt}", served if served is not None else _open_client(ranks, deadline)
    )
    try:
        _sign_in(store, ranks, ends)
        _await_all(store, ranks, deadline, limits)
    except RuntimeError as error:
        raise UserError(
            f"{ranks.name} lost rank 0 at {ranks.master_addr}:{ranks.master_port} while connecting.",
            why=_first_line(error),
            do="read the last output of rank 0",
        ) from error
    store.set_timeout(timedelta(seconds=limits.collective_s))
    return store


def second_connection(ranks: Ranks, limits: Limits) -> dist.Store:
    """Return a second connection to the store, for a thread that must not wait for the first."""
    return _open_client(ranks, time.monotonic() + limits.connect_s)


def shared_store(store: dist.Store) -> dist.Store:
    """Return the store without the prefix of the attempt."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def use_interface_of(ranks: Ranks, store: dist.Store) -> None:
    """Make gloo and NCCL use the network interface between this machine and the master, unless the user chose one.

    By default gloo uses the address of the host's name: often loopback or another network.
    """
    own = json.loads(store.get(f"rank/{ranks.rank}"))["from"]
    if ranks.num_nodes > 1 and is_loopback(
        own
    ):  # on the master's node: use the interface that another node reached
        entries = (json.loads(store.get(f"rank/{rank}")) for rank in range(ranks.size))
        own = next((entry["reached"] for entry in entries if not is_loopback(entry["reached"])), own)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(plain_address(each.address) == plain_address(own) for each in addresses):
            add_variables({"GLOO_SOCKET_IFNAME": interface})
            if ranks.num_nodes > 1:
                add_variables({"NCCL_SOCKET_IFNAME": interface})
            return


def _make_store(ranks: Ranks, timeout_s: float, **served: Any) -> dist.Store:
    return dist.TCPStore(
        ranks.master_addr,
        ranks.master_port,
        is_master=bool(served),
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        **served,
    )


def _open_client(ranks: Ranks, deadline: float) -> dist.Store:
    """Connect to the master's store in a thread: torch would wait forever for a program that never answers."""
    found: list[dist.Store] = []
    problems: list[str] = []
    left_s = max(1.0, deadline - time.monotonic())

    def open_it() -> None:
        try:
            found.append(_make_store(ranks, left_s))
        except RuntimeError as error:
            problems.append(_first_line(error))

    thread = threading.Thread(target=open_it, daemon=True)
    thread.start()
    thread.join(left_s)
    if found:
        return found[0]
    raise UserError(
        f"{ranks.name} reaches {ranks.master_addr}:{ranks.master_port}, but a different program answers.",
        why=problems[0] if problems else f"it did not answer as a store within {left_s:.0f} s.",
        do="choose a different --master_port (MASTER_PORT)",
    )


def _listen(ranks: Ranks) -> socket.socket:
    """Listen on the master's address only, so that a run on one machine is not reachable from outside."""
    where = f"{ranks.name} cannot listen on {ranks.master_addr}:{ranks.master_port}."
    try:
        return listen(ranks.master_addr, ranks.master_port, several=ranks.num_nodes > 1)
    except socket.gaierror as error:
        raise _unreachable(ranks, why=f"{ranks.master_addr} is not a valid address: {error}") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                where,
                why="another program is using this port.",
                do="choose a different --master_port (MASTER_PORT)",
            ) from error
        raise UserError(
            where, why=f"{error}.", do="set MASTER_ADDR to an address of the machine on which rank 0 runs"
        ) from error


def _await_master(ranks: Ranks, limits: Limits) -> dict[str, str]:
    """Wait until the master listens; return both addresses of a connection to it."""
    try:
        with reach(
            ranks.master_addr, ranks.master_port, limit_s=limits.connect_s, node_rank=ranks.node_rank
        ) as found:
            return {"reached": str(found.getpeername()[0]), "from": str(found.getsockname()[0])}
    except OSError as error:
        raise _unreachable(ranks, why=str(error)) from error


def _unreachable(ranks: Ranks, *, why: str) -> UserError:
    return UserError(
        f"{ranks.name} cannot reach rank 0 at {ranks.master_addr}:{ranks.master_port}.",
        why=why,
        do="set MASTER_ADDR and MASTER_PORT to the address of rank 0 for all processes, start all of them, and let the "
        "port through the firewall",
    )


def _sign_in(store: dist.Store, ranks: Ranks, ends: dict[str, str]) -> None:
    """Record this rank; raise if another process has the same rank."""
    if store.add(f"count/{ranks.rank}", 1) > 1:
        raise UserError(
            f"Two processes claim to be rank {ranks.rank} of {ranks.size}.",
            why=f"both reached the store at {ranks.master_addr}:{ranks.master_port}.",
            do="give each process its own RANK; two runs at the same time need different values of MASTER_PORT",
        )
    store.set(f"rank/{ranks.rank}", json.dumps({"host": ranks.host, "size": ranks.size, **ends}))


def _await_all(store: dist.Store, ranks: Ranks, deadline: float, limits: Limits) -> None:
    """Wait until all ranks have signed in; raise if one of them has a different world size."""
    missing = set(range(ranks.size))
    while True:
        for rank in sorted(missing):
            if not store.check([f"rank/{rank}"]):
                continue
            entry = json.loads(store.get(f"rank/{rank}"))
            if entry["size"] != ranks.size:
                raise UserError(
                    f"Rank {rank} (host {entry['host']}) is one of {entry['size']}, {ranks.name} is not.",
                    do="start all processes of the run with the same WORLD_SIZE",
                )
            missing.discard(rank)
        if not missing:
            return
        if time.monotonic() > deadline:
            shown = ", ".join(map(str, sorted(missing)[:8])) + (", ..." if len(missing) > 8 else "")
            raise UserError(
                f"{'Ranks' if len(missing) > 1 else 'Rank'} {shown} of {ranks.size} did not connect within {limits.connect_s:g} s.",
                why=f"{ranks.name} waited for it at {ranks.master_addr}:{ranks.master_port}.",
                do="check the output of that process; start all processes within this time, or raise --connect_timeout",
            )
        time.sleep(0.02)


_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|timed out|aborted)|broken pipe|socket (closed|timeout)"
    r"|timed out waiting|wait timeout|watchdog|peer closed|unhandled system error|remote process exited"
    r"|ncclremoteerror|ncclsystemerror|gloo (send|recv)|application timeout|read error|writev? error",
    re.IGNORECASE,
)
_MISMATCH = re.compile(r"Detected mismatch between collectives on ranks")
_FROM_A_COLLECTIVE = re.compile(r"gloo|nccl|xccl|c10d|socket|store|process ?group", re.IGNORECASE)


@contextlib.contextmanager
def peer_errors(ranks: Ranks, *, doing: str) -> Iterator[None]:
    """Convert errors of collectives in the `with` block: PeerLost if another process failed, a UserError if the ranks called
    different collectives (torch compares them with --debug_collectives)."""
    try:
        yield
    except RuntimeError as error:  # also DistBackendError, DistNetworkError and DistStoreError
        if _MISMATCH.search(str(error)):
            raise UserError(
                f"{ranks.name}: the processes of the run called different collectives in {doing}.",
                why=_first_line(error),
                do="make the model or recipe run the same operations on every process",
            ) from error
        if not is_lost_peer(error):
            raise
        raise PeerLost(
            f"{ranks.name} lost the connection to another process in {doing}.",
            why=_first_line(error),
            do="read the last output of that process; --resume continues the run from its newest checkpoint",
        ) from error


def is_lost_peer(error: RuntimeError) -> bool:
    """Return True if an error of torch means that another process exited or timed out."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    text = str(error)
    return bool(
        _LOST.search(text) and (isinstance(error, dist.DistBackendError) or _FROM_A_COLLECTIVE.search(text))
    )


def _first_line(error: RuntimeError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
