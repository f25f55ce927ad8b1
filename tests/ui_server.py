"""A server of the page in this process, and requests to it."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.ui.guard import Guard, read_token
from crosstune.ui.server import make_server

WAIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class Served:
    port: int
    token: str

    @property
    def cookie(self) -> str:
        return f"{Guard(lambda *_: None, token=self.token).cookie}={self.token}"  # type: ignore[arg-type, return-value]

    def send(
        self, method: str, path: str, body: Any = None, *, without: tuple[str, ...] = (), **headers: str
    ) -> Answer:
        """Send a request as the page does, with other headers, or without some."""
        sent = {"Cookie": self.cookie, "X-Crosstune-Token": self.token}
        sent = {name: value for name, value in sent.items() if name not in without}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            data = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(status=answer.status, headers=names, body=answer.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.send("GET", path)
        assert answer.status == 200, answer.body
        return answer.data if answer.headers["content-type"] == "application/json" else answer.body.decode()

    def post(self, name: str, body: Any) -> Answer:
        return self.send("POST", f"/api/{name}", body)

    @contextmanager
    def events(
        self, run: str, *, last: str = "", after: str = ""
    ) -> Iterator[Iterator[tuple[str, str, Any]]]:
        """Yield the id, the kind and the data of each event of a run."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        headers = {"Cookie": self.cookie} | ({"Last-Event-ID": last} if last else {})
        connection.request("GET", f"/api/events?run={run}&after={after}", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()

        def read() -> Iterator[tuple[str, str, Any]]:
            event = {"event": "message"}
            while line := answer.readline().decode():
                name, _, value = line.rstrip("\n").partition(": ")
                if line != "\n":
                    event[name] = value
                elif "data" in event:
                    yield event.get("id", ""), event["event"], json.loads(event["data"])
                    event = {"event": "message"}

        try:
            yield read()
        finally:
            connection.close()


@contextmanager
def serving(parent: Path) -> Iterator[Served]:
    """Serve the runs of a folder until the end of the `with` block."""
    token = read_token(parent)
    server = make_server(parent, token=token)
    server.config.port = 0
    server.config.timeout_graceful_shutdown = int(WAIT_S)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.01)
    [socket] = server.servers[0].sockets
    try:
        yield Served(port=socket.getsockname()[1], token=token)
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def until(holds: Callable[[], Any]) -> Any:
    """Return the first true value; the limit is generous, since machines are slow."""
    end = time.monotonic() + WAIT_S
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
