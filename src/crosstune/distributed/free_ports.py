"""Find free ports."""

from __future__ import annotations

import contextlib
import socket


def free_ports(count: int, *, address: str = "127.0.0.1") -> list[int]:
    """Return free ports; each stays bound until all are found, so that they differ."""
    with contextlib.ExitStack() as stack:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        sockets = [stack.enter_context(socket.socket(family, socket.SOCK_STREAM)) for _ in range(count)]
        for found in sockets:
            found.bind((address, 0))
        return [int(found.getsockname()[1]) for found in sockets]
