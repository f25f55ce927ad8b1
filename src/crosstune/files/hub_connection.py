"""Test for a few seconds whether the hub can be reached: its libraries would retry for a minute."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator

WAIT_S = 4.0
"""Seconds for looking up the name and connecting, together."""


def why_unreachable(endpoint: str) -> str | None:
    """Return why an address such as https://huggingface.co does not answer; None if it does, or is behind a proxy."""
    address = urllib.parse.urlsplit(endpoint)
    host = address.hostname
    if host is None or (
        address.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host)
    ):
        return None
    found: list[str] = []
    port = address.port or (80 if address.scheme == "http" else 443)
    # In a thread, since name lookup has no timeout.
    asking = threading.Thread(target=_connect, args=(host, port, found), daemon=True)
    asking.start()
    asking.join(WAIT_S)
    if not found:
        return f"{host} did not answer within {WAIT_S:g} seconds"
    return found[0] or None


def _connect(host: str, port: int, found: list[str]) -> None:
    try:
        socket.create_connection((host, port), timeout=WAIT_S).close()
        found.append("")
    except OSError as error:
        found.append(f"{host} cannot be reached: {error.strerror or error}")


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[str | None]:
    """Restrict the hub's libraries to their caches in the `with` block if the hub cannot be reached; yield why."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        yield "HF_HUB_OFFLINE is set"
        return
    reason = why_unreachable(constants.ENDPOINT)
    if reason is None:
        yield None
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield reason
    finally:
        constants.HF_HUB_OFFLINE = False
