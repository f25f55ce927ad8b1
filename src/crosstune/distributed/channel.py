"""Exchange messages between the launchers of several machines: lines of JSON with heartbeats over TCP."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import Any

from crosstune.core.active_time import ActiveClock
from crosstune.core.json_files import parse_json

BEAT_S = 1.0
"""Seconds between two heartbeats."""
LONGEST_LINE = 2**20
"""Bytes of a message; the other side hangs up at a longer one."""

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
        self._clock = ActiveClock()  # machines that were suspended together have not lost each other
        self._heard = self._clock.now()
        for act in (self._receive, self._beat):
            threading.Thread(target=act, daemon=True).start()

    def send(self, message: Message) -> None:
        """Send a message; `silent_s` tells of a lost connection."""
        line = json.dumps(message).encode() + b"\n"
        assert len(line) <= LONGEST_LINE, f"a message of {len(line):,} bytes"
        with self._sending:
            try:
                self._socket.sendall(line)
            except OSError:
                self.closed = True

    def silent_s(self) -> float:
        """Return the seconds since the other side was heard; infinity once it has closed the connection."""
        if self.closed and self.inbox.empty():
            return float("inf")
        return self._clock.now() - self._heard

    def close(self) -> None:
        self.closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self) -> None:
        """Read lines until the other side hangs up or sends something else."""
        try:
            with contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
                while (line := lines.readline(LONGEST_LINE)).endswith(b"\n"):
                    self._heard = self._clock.now()
                    message = parse_json(line)
                    if isinstance(message, dict) and message:
                        self.inbox.put(message)
        finally:
            self.closed = True

    def _beat(self) -> None:
        while not self.closed:
            self.send({})
            self._clock.now()
            time.sleep(BEAT_S)
