"""Listen for clients, and pass each request to the engine server of the model that it asks for.

Clients see one address with all models. The engine servers listen on loopback, each on a port of its own.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import ipaddress
import json
import re
import selectors
import socket
import socketserver
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosstune.core.errors import UserError
from crosstune.files.openai_client import LOOPBACK_NAMES

LOOPBACK = "127.0.0.1"
_LARGEST_BODY = 64 << 20
_LONGEST_LENGTH = 12
"""Digits of a Content-Length."""
_MODEL_FIELD = re.compile(rb'(?<!\\)"model": ?"(?:[^"\\]|\\.)*"')
_ANSWER_S = 3600.0
"""Longest wait for an engine: a queue of long answers on a CPU."""
_REQUEST_S = 120.0
"""Longest wait for the rest of a client's request."""
_KEPT_HEADERS = ("content-type", "cache-control")


@dataclass(frozen=True, kw_only=True)
class Upstream:
    """An engine server on loopback, and its own name for the model."""

    port: int
    model: str
    api_key: str = ""


class Router(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """The server that clients see. It listens from the start and answers with status 503 until models are added."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, *, api_key: str = "") -> None:
        self.api_key = api_key
        self.models: dict[str, Upstream] = {}
        """The models by name; empty while they load."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise UserError(
                f"Cannot listen on {host}, port {port}.",
                why=f"{getattr(error, 'strerror', None) or error}.",
                do="choose a different --port (0 takes a free one), or end the program that uses it",
            ) from error
        self.host, self.port = host, int(self.server_address[1])
        self.only_loopback = host in LOOPBACK_NAMES

    @property
    def url(self) -> str:
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Router
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "crosstune", ""
    timeout = _REQUEST_S
    disable_nagle_algorithm = True  # a token is sent at once

    def parse_request(self) -> bool:
        """Reject a malformed address before it is parsed or passed on."""
        if not super().parse_request():
            return False
        with contextlib.suppress(ValueError):
            urllib.parse.urlsplit(self.path)
            if self.path.isascii() and self.path.isprintable():
                return True
        self.close_connection = True
        self._refuse(400, "The address of the request is malformed.")
        return False

    def do_GET(self) -> None:
        path = urllib.parse.urlsplit(self.path).path.rstrip("/")
        models = self.server.models
        if not self._is_allowed():
            return
        if path in ("", "/health"):
            self._send(200 if models else 503, {"status": "ok" if models else "loading"})
        elif path.startswith("/v1/models") and not models:
            self._refuse(503, "The model is loading.")
        elif path == "/v1/models":
            self._send(200, {"object": "list", "data": [_describe(name) for name in models]})
        elif path.startswith("/v1/models/") and (name := path.removeprefix("/v1/models/")) in models:
            self._send(200, _describe(name))
        else:
            self._refuse(404, f"There is no {path}.")

    def do_POST(self) -> None:
        if not self._is_allowed():
            self.close_connection = True  # the body is not read
            return
        body = self._read_body()
        if body is None:
            return
        if not self.path.startswith("/v1/"):
            self._refuse(404, f"There is no {self.path}.")
            return
        try:
            asked = json.loads(body)
        except (ValueError, RecursionError):
            asked = None
        if not isinstance(asked, dict):
            self._refuse(400, "The body of the request is not a JSON object.")
            return
        models = self.server.models
        name = asked.get("model") or next(iter(models), "")
        if not models:
            self._refuse(503, "The model is loading.")
        elif not isinstance(name, str) or name not in models:
            self._refuse(404, f"There is no model {name}; the models are: {', '.join(models)}.")
        else:
            upstream = models[name]
            self._forward_request(upstream, json.dumps(asked | {"model": upstream.model}).encode(), name)

    def _is_allowed(self) -> bool:
        """Check the key, on loopback the Host header, and without a key the Origin: a web page could otherwise reach the server
        by DNS rebinding, or make the model work."""
        host = _host_of(f"//{self.headers.get('Host', LOOPBACK)}")
        if self.server.only_loopback and host not in LOOPBACK_NAMES:
            self._refuse(403, "This server answers on loopback only; start it with --host to serve others.")
            return False
        key, origin = self.server.api_key, self.headers.get("Origin")
        sent = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        # Headers are decoded as latin-1.
        if key and not hmac.compare_digest(sent.encode("latin-1"), key.encode()):
            self._refuse(401, "The API key is missing or wrong.")
            return False
        if not key and origin is not None and not _is_own_page(_host_of(origin), host):
            self._refuse(403, "Web pages need a key: start the server with --api_key KEY.")
            return False
        return True

    def _read_body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or len(length) > _LONGEST_LENGTH or int(length) > _LARGEST_BODY:
            self.close_connection = True
            self._refuse(
                413 if length.isdecimal() else 411, "The request needs a Content-Length below 64 MiB."
            )
            return None
        return self.rfile.read(int(length))

    def _forward_request(self, upstream: Upstream, body: bytes, name: str) -> None:
        """Send the request to the engine and its answer to the client. If the client disconnects, stop the engine's work."""
        headers = {"Content-Type": "application/json"}
        if upstream.api_key:
            headers["Authorization"] = f"Bearer {upstream.api_key}"
        engine = http.client.HTTPConnection(LOOPBACK, upstream.port, timeout=_ANSWER_S)
        with contextlib.closing(engine):
            try:
                engine.request("POST", self.path, body, headers)
                if not self._client_waits(engine.sock):
                    self.close_connection = True
                    return
                answer = engine.getresponse()
            except (http.client.HTTPException, OSError) as error:
                self.close_connection = True
                self._refuse(502, f"The engine did not answer: {type(error).__name__}.")
                return
            try:
                self._copy(answer, name)
            except (http.client.HTTPException, OSError):
                self.close_connection = True  # the engine exited, or the client left: the answer is cut

    def _client_waits(self, engine: socket.socket) -> bool:
        """Wait until the engine answers; return False if the client disconnects first."""
        while True:
            ready = _readable(engine, self.connection)
            if engine in ready or not ready:
                return True
            if not self.connection.recv(1, socket.MSG_PEEK):
                return False
            # The client sent its next request already; it still waits for this answer.
            _readable(engine)
            return True

    def _copy(self, answer: http.client.HTTPResponse, name: str) -> None:
        """Copy an answer line by line, as it arrives, with the model's name in place of the engine's own."""
        field = b'"model":' + json.dumps(name).encode()

        def renamed(data: bytes) -> bytes:
            return _MODEL_FIELD.sub(lambda found: field, data, count=1)

        is_stream = not answer.getheader("Content-Length")
        body = b"" if is_stream else renamed(answer.read())
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() in _KEPT_HEADERS:
                self.send_header(name, value)
        length = ("Transfer-Encoding", "chunked") if is_stream else ("Content-Length", str(len(body)))
        self.send_header(*length)
        self.end_headers()
        self.wfile.write(body)
        if is_stream:
            for line in map(renamed, iter(answer.readline, b"")):
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
            self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, message: str) -> None:
        kind = {401: "invalid_api_key", 404: "model_not_found"}.get(status)
        self._send(status, {"error": {"message": message, "type": "invalid_request_error", "code": kind}})

    def _send(self, status: int, data: Mapping[str, Any]) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: requests contain what users write."""


def _host_of(url: str) -> str | None:
    try:
        return urllib.parse.urlsplit(url).hostname
    except ValueError:
        return None


def _is_own_page(origin: str | None, host: str | None) -> bool:
    """Check that a page is from this machine, or from the address that it asks. A DNS name could have been rebound; an IP
    address or this machine's own name cannot."""
    if origin in LOOPBACK_NAMES:
        return True
    if origin is None or origin != host:
        return False
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(origin))
    return origin == socket.gethostname().lower()


def _readable(*sockets: socket.socket) -> list[Any]:
    """Wait for data and return the sockets that have some."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(_ANSWER_S)]


def _describe(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "crosstune"}
