"""The router of `crosstune serve` and the client of `crosstune chat --server`: keys, origins, and servers that answer anything."""

from __future__ import annotations

import http.client
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.files.openai_client import connect
from crosstune.serve.router import Router, Upstream

KEY = "ключ-é"
Captured = pytest.CaptureFixture[str]


def status(router: Router, **headers: str) -> int:
    asked = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
    sent = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    asked.request("POST", "/v1/chat/completions", b"{}", sent)
    code = asked.getresponse().status
    asked.close()
    return code


@pytest.mark.parametrize("key", ["", KEY])
def test_a_web_page_needs_a_key(key: str) -> None:
    with Router("127.0.0.1", 0, api_key=key) as router:
        router.start()
        allowed = {"Authorization": f"Bearer {key}"} if key else {}
        assert status(router, **allowed) == 503  # still loading
        for origin in ("http://localhost:3000", "http://127.0.0.1", f"http://[::1]:{router.port}"):
            assert status(router, Origin=origin, **allowed) == 503
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "http://[", ""):
            assert status(router, Origin=origin, **allowed) == (503 if key else 403)
        assert status(router, Host="evil.example", **allowed) == 403
        assert status(router, Host="[", **allowed) == 403
        if key:
            for wrong in ("", "Bearer ", "Bearer ключ", KEY):
                assert status(router, Authorization=wrong) == (503 if wrong == KEY else 401)
        router.shutdown()


@pytest.mark.parametrize(
    ("line", "length", "code"),
    [
        (b"POST /v1/chat/completions", b"9" * 5000, b"413"),
        (b"POST /v1/chat/\xc3\xa9", b"2", b"400"),
        (b"POST /v1/\x01", b"2", b"400"),
        (b"GET http://[::1", b"0", b"400"),
    ],
)
def test_a_damaged_request_is_answered(line: bytes, length: bytes, code: bytes) -> None:
    with Router("127.0.0.1", 0) as router:
        router.models["m"] = Upstream(port=1, model="m")
        router.start()
        with socket.create_connection(("127.0.0.1", router.port), timeout=60) as client:
            client.sendall(
                line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n{}"
            )
            assert client.makefile("rb").readline().split()[1] == code
        router.shutdown()


def test_every_address_of_the_models_says_that_they_load() -> None:
    with Router("127.0.0.1", 0) as router:
        router.start()

        def answer(path: str) -> tuple[int, Any]:
            asked = http.client.HTTPConnection("127.0.0.1", router.port, timeout=60)
            asked.request("GET", path)
            found = asked.getresponse()
            return found.status, json.loads(found.read())

        assert [answer(path)[0] for path in ("/health", "/v1/models", "/v1/models/m")] == [503] * 3
        with pytest.raises(UserError, match="loading") as caught:
            connect(router.url)
        assert caught.value.do == "wait until the server has loaded its model, then try again"
        router.models["m"] = Upstream(port=1, model="m")
        assert answer("/health")[0] == 200 and answer("/v1/models")[1]["data"][0]["id"] == "m"
        assert answer("/v1/models/m")[0] == 200 and answer("/v1/models/other")[0] == 404
        router.shutdown()


def test_a_rebound_name_is_not_the_servers_own_page() -> None:
    """A server for the network, without a key: programs may call it by any name, pages only by one that DNS cannot change."""
    with Router("127.0.0.1", 0) as router:
        router.only_loopback = False
        router.start()
        own = socket.gethostname()
        for host in ("192.168.1.5", "[fe80::1]", own):
            assert status(router, Host=f"{host}:8000", Origin=f"http://{host}:8000") == 503
        assert status(router, Host="models.internal") == 503
        assert status(router, Host="evil.example", Origin="http://evil.example") == 403
        assert status(router, Host="192.168.1.5", Origin="http://192.168.1.6") == 403
        router.shutdown()


def test_a_key_outside_latin_1_opens_the_server(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # not for this machine
    with Router("127.0.0.1", 0, api_key=KEY) as router:
        router.models["demo"] = Upstream(port=1, model="demo")
        router.start()
        assert connect(router.url, api_key=KEY).name == "demo"
        with pytest.raises(UserError, match="rejects the key"):
            connect(router.url, api_key="ключ")
        router.shutdown()
    for key in ("", "two words", "a\nb"):
        assert main(["chat", "--server", "http://127.0.0.1:1", "--api_key", key]) == 2
        said = capsys.readouterr().err
        assert "one word of printable characters" in said and "two words" not in said


class Hostile(http.server.BaseHTTPRequestHandler):
    models: bytes
    events = b""
    code = 200
    place = ""

    def _answer(self, body: bytes) -> None:
        self.send_response(self.code)
        if self.place:
            self.send_header("Location", self.place)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._answer(self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(self.events)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hostile() -> Iterator[tuple[type[Hostile], str]]:
    handler: Any = type("Handler", (Hostile,), {"models": json.dumps({"data": [{"id": "m"}]}).encode()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


DEEP = b"[" * 5000 + b"]" * 5000


@pytest.mark.parametrize(
    "body", [b"", b"{", DEEP, b'{"data": 3}', b'{"data": [{"id": 1}, 2]}', b"\xff", b'{"data": [], "x": "' + b"x" * 2**21]
)  # fmt: skip
def test_a_server_with_a_bad_list_of_models(body: bytes, hostile: tuple[Any, str]) -> None:
    handler, url = hostile
    handler.models = body
    with pytest.raises(UserError, match="does not speak the OpenAI protocol"):
        connect(url)
    handler.code = 500
    with pytest.raises(UserError, match="status 500"):
        connect(url)


@pytest.mark.parametrize("code", [400, 401, 429, 500])
def test_a_key_that_a_server_repeats_is_not_shown(code: int, hostile: tuple[Any, str]) -> None:
    handler, url = hostile
    model = connect(url, api_key=KEY)
    asked: Any = {"messages": [{"role": "user", "content": "x"}], "max_new_tokens": 4}
    error = {"error": {"message": f"no such key: {KEY}"}}
    handler.code, handler.events = code, json.dumps(error).encode()
    for ask in (model.answer, model.complete):
        with pytest.raises(UserError) as caught:
            ask(**asked)
        assert "no such key: [key]" in caught.value.why and KEY not in str(caught.value)
    handler.code, handler.events = 200, b"data: " + json.dumps(error).encode() + b"\n\n"
    with pytest.raises(UserError, match=r"no such key: \[key\]"):
        model.answer(**asked)


@pytest.mark.parametrize("code", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_with_the_key(code: int, hostile: tuple[Any, str]) -> None:
    handler, url = hostile
    model = connect(url, api_key=KEY)
    asked = list[str]()

    def note(self: Hostile) -> None:
        asked.append(self.path)
        Hostile.do_GET(self)

    handler.code, handler.place, handler.do_GET = code, f"{url}/elsewhere", note
    for ask in (lambda: connect(url, api_key=KEY), lambda: model.complete([], max_new_tokens=1)):
        with pytest.raises(UserError, match=f"redirects to '?{url}/elsewhere"):
            ask()
    assert asked == ["/v1/models"]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "no stream of events"),
        (b'{"choices": [{"message": {"content": "Hi"}}]}', "no stream of events"),
        (b"x" * 2**21, "a line of more than 1 MiB"),
    ],
)
def test_an_answer_that_is_no_stream_is_an_error(answer: bytes, words: str, hostile: tuple[Any, str]) -> None:
    handler, url = hostile
    handler.events = answer
    with pytest.raises(UserError, match=words):
        connect(url).answer([{"role": "user", "content": "x"}], max_new_tokens=4)


@pytest.mark.parametrize(
    "event", [b"{", DEEP, b"3", b'{"choices": 3}', b'{"choices": [{"delta": [1]}]}', b'{"error": ' + DEEP + b"}", b"x" * 2**21]
)  # fmt: skip
def test_a_server_with_bad_events(event: bytes, hostile: tuple[Any, str]) -> None:
    handler, url = hostile
    good = b'data: {"choices": [{"delta": {"content": "Hi"}}]}\n\n'
    handler.events = good + b"data: " + event + b"\n\n"
    model, parts = connect(url), list[str]()
    with pytest.raises(UserError, match=r"does not speak the OpenAI protocol|status 500"):
        model.answer([{"role": "user", "content": "x"}], max_new_tokens=4, on_text=parts.append)
    assert parts == ["Hi"]
    handler.events = good + b"data: [DONE]\n\n"
    assert model.answer([{"role": "user", "content": "x"}], max_new_tokens=4) == "Hi"


@pytest.mark.parametrize(
    "url", ["http://[", "", "ftp://x", "http://", f"http://{'a' * 70}.com", "http://h:x"]
)
def test_an_address_that_is_none(url: str, capsys: Captured) -> None:
    assert main(["chat", "--server", url]) == 2
    assert "do:" in capsys.readouterr().err
