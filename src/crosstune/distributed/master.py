"""Listen on node 0, connect to it from the others, and find free ports.

Debian maps a host's own name to 127.0.1.1, where node 0 would be unreachable for the others.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from typing import Any

from crosstune.core.errors import UserError

_RETRY_S = 0.2


def is_loopback(address: str) -> bool:
    """True if the address is loopback: numeric, or the name localhost."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(plain_address(address)).is_loopback
    except ValueError:
        return False


def plain_address(address: str) -> str:
    """Return a numeric address without its interface, IPv4-mapped IPv6 as IPv4; return other text unchanged."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)


def resolve(name: str, port: int) -> list[tuple[Any, ...]]:
    """Return `socket.getaddrinfo` of a name, loopback addresses last."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted(found, key=lambda entry: is_loopback(str(entry[4][0])))


def listen(name: str, port: int, *, several: bool, backlog: int = 1024) -> socket.socket:
    """Listen at the address of node 0; on all interfaces if `several` nodes use a name that is loopback on this one."""
    problem = OSError(f"{name} has no address")
    for family, kind, protocol, _, address in resolve(name, port):
        if several and is_loopback(str(address[0])) and not is_loopback(name):
            address = ("::" if family == socket.AF_INET6 else "0.0.0.0", *address[1:])
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(backlog)
        except OSError as error:
            listening.close()
            problem = error
            continue
        return listening
    raise problem


def check_master(name: str, *, node_rank: int) -> None:
    """Raise a UserError on a node that would connect to itself instead of node 0."""
    own = socket.gethostname().partition(".")[0]
    if node_rank == 0 or is_loopback(name) or name.partition(".")[0] == own:
        return  # a trial with several launchers on one node uses localhost or its name
    if (address := loopback_only_address(name)) is not None:
        raise UserError(
            f"{name} is node 0 of the run (MASTER_ADDR), but it leads back to {own}.",
            why=f"the name resolves to {address} on this node, so {own} would connect to itself.",
            do=f"set MASTER_ADDR to an address of {name} that the other nodes reach, such as 10.0.0.1, or remove the "
            f"line with {address} from /etc/hosts",
        )


def loopback_only_address(name: str) -> str | None:
    """Return the loopback address of a name with no other address; None if it has others or cannot be resolved."""
    try:
        first = str(resolve(name, 0)[0][4][0])
    except OSError:
        return None
    return first if is_loopback(first) else None


def reach(name: str, port: int, *, limit_s: float, node_rank: int) -> socket.socket:
    """Connect to node 0, retrying for up to `limit_s` seconds; then raise an OSError with the reason."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            found = socket.create_connection((name, port), timeout=max(0.1, deadline - time.monotonic()))
            if found.getpeername() != found.getsockname():
                return found
            found.close()  # connected to itself: without a listener, the system may choose the same port for both ends
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                back = loopback_only_address(name) if node_rank else None
                more = f"; {name} resolves to {back}, which is this node" if back else ""
                raise OSError(f"nothing answered within {limit_s:g} s ({error}){more}.") from error
        time.sleep(_RETRY_S)


def free_ports(count: int, *, address: str = "127.0.0.1") -> list[int]:
    """Return free ports; each stays bound until all are found, so that they differ."""
    with contextlib.ExitStack() as stack:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        sockets = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        for found in sockets:
            found.bind((address, 0))
        return [int(found.getsockname()[1]) for found in sockets]
