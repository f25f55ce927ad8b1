"""Send and receive messages between the launchers of several machines: lines of JSON with heartbeats over TCP."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import Any

BEAT_S = 1.0
"""How often each side says that it is there."""
_LONGEST_LINE = 2**20

Message = dict[str, Any]


class Channel:
    """A connection to another launcher. Messages that arrive are kept in `inbox`; heartbeats are not."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connected
        self._sending = threading.Lock()
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.closed = False
        self._heard = time.monotonic()
        for act in (self._receive, self._beat):
            threading.Thread(target=act, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; a connection that is gone is noticed by `silent_s`."""
        with self._sending:
            try:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
            except OSError:
                self.closed = True

    def silent_s(self) -> float:
        """Return the seconds since the other side was heard; infinity once it has closed the connection."""
        if self.closed and self.inbox.empty():
            return float("inf")
        return time.monotonic() - self._heard

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            while (line := lines.readline(_LONGEST_LINE)).endswith(b"\n"):
                self._heard = time.monotonic()
                message = json.loads(line)
                if isinstance(message, dict) and message:
                    self.inbox.put(message)
        self.closed = True

    def _beat(self) -> None:
        while not self.closed:
            self.send({})
            time.sleep(BEAT_S)
