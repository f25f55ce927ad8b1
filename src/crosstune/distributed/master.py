"""Resolve the name of a run's first machine: where it listens, and whether the others can reach it.

Debian's installer lets a host name resolve to 127.0.1.1 on its own machine, so a first machine that listened where its name
leads would be reached by nobody else, and a machine with a copied /etc/hosts would look for the first one in itself.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from crosstune.core.errors import UserError

_LOCAL = "localhost"


def is_loopback(address: str) -> bool:
    """Return whether a numeric address, or the name localhost, means the machine itself."""
    if address == _LOCAL:
        return True
    try:
        return ipaddress.ip_address(plain_address(address)).is_loopback
    except ValueError:
        return False


def plain_address(address: str) -> str:
    """Return a numeric address without its interface, and one of IPv4 that is written as IPv6 in its own form; any other
    text as it is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    return str(getattr(found, "ipv4_mapped", None) or found)


def resolve(name: str, port: int) -> list[tuple[Any, ...]]:
    """Return the addresses of a name as `socket.getaddrinfo` does, those of other machines before loopback."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return sorted(found, key=lambda entry: is_loopback(str(entry[4][0])))


def listen(name: str, port: int, *, several: bool, backlog: int = 1024) -> socket.socket:
    """Listen at the address of the first machine, at none beside it. With `several` machines and a name that only leads
    back to this one, listen at all addresses: the others resolve the name to one of them."""
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
    """Raise a UserError on a machine that would look for the first one in itself."""
    own = socket.gethostname().partition(".")[0]
    if node_rank == 0 or is_loopback(name) or name.partition(".")[0] == own:
        return  # several launchers on one machine, for a trial, are told so by localhost or their own name
    if (address := leads_back(name)) is not None:
        raise UserError(
            f"{name} is the first machine of the run (MASTER_ADDR), but leads back to {own}, which is not the first one.",
            why=f"the name resolves to {address} here, so that {own} would connect to itself.",
            do=f"set MASTER_ADDR to an address of {name} that the other machines reach, such as 10.0.0.1, or remove the "
            f"line with {address} from /etc/hosts",
        )


def leads_back(name: str) -> str | None:
    """Return the loopback address of a name that has no other; None if it has one, or cannot be resolved."""
    try:
        first = str(resolve(name, 0)[0][4][0])
    except OSError:
        return None
    return first if is_loopback(first) else None


def explain_refusal(name: str) -> str:
    """Return what to add to the error of a machine that did not reach the first one; empty if its address is fine."""
    address = leads_back(name)
    return f"; {name} leads to {address}, which is this machine itself" if address is not None else ""
