"""Chat with an OpenAI-compatible server: /v1/chat/completions, as a stream or at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.core.sampling import GREEDY, Sampling
from crosstune.files.json_files import parse_json

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
WAIT_S = 600.0
"""Longest wait for the next token: a server may load a model or read a long prompt first."""
_CONNECT_S = 20.0
_MAX_REASON_BYTES = 4000
_MAX_BYTES = 1 << 20
"""The largest list of models, and the longest line of an answer."""
_AWAY = (408, 409, 425, 429)
"""Statuses below 500 with which a server asks the client to try again later."""
_MOVED = (301, 302, 303, 307, 308)
_REJECTED = (400, 413, 422)
"""Statuses that concern the content of a request."""
_ADVICE = {
    404: "check the address and the name of the model",
    429: "try again later",
    503: "wait until the server has loaded its model, then try again",
}


class ServerAway(UserError):
    """The server does not answer now; the same request may succeed later."""


class RequestRejected(UserError):
    """The server does not accept this request, such as a prompt beyond its context; it may accept others."""


@dataclass(frozen=True, kw_only=True)
class ServerModel:
    """A model behind a server, with the `answer` method of a local ChatModel."""

    url: str
    name: str
    api_key: str = ""

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        on_text: Callable[[str], None] | None = None,
    ) -> str:
        """Return the model's next turn. `on_text` receives it as the server sends it."""
        asked: dict[str, Any] = {"model": self.name, "messages": list(messages), "stream": True}
        asked |= {"max_tokens": max_new_tokens, "temperature": sampling.temperature, "seed": sampling.seed}
        for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
            if (value := getattr(sampling, name)) != getattr(GREEDY, name):
                asked[name] = value
                asked |= {"repeat_penalty": value} if name == "repetition_penalty" else {}  # for llama.cpp
        parts = []
        with _open(f"{self.url}/chat/completions", self.api_key, data=asked, wait_s=WAIT_S) as answer:
            for text in _read_stream(answer, self.url, self.api_key):
                parts.append(text)
                if on_text is not None:
                    on_text(text)
        return "".join(parts)

    def complete(self, messages: Sequence[Mapping[str, Any]], *, max_new_tokens: int) -> str:
        """Return the most likely answer, whole; raise ServerAway if a later attempt may succeed."""
        asked = {"model": self.name, "messages": list(messages), "temperature": 0.0, "seed": 0}
        asked |= {"max_tokens": max_new_tokens, "stream": False}
        with _open(f"{self.url}/chat/completions", self.api_key, data=asked, wait_s=WAIT_S) as answer:
            body = answer.read(_MAX_BYTES)
        try:
            return str(parse_json(body, foreign=True)["choices"][0]["message"].get("content") or "")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _not_openai(self.url, "its answer cannot be read") from error


def connect(url: str, *, name: str | None = None, api_key: str = "") -> ServerModel:
    """Return a model of the server: the first in its list, or the one called `name`, which may be the path of its run."""
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:
        parts = urllib.parse.urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{shown(url)} is not the address of a server.", do="pass --server http://HOST:PORT")
    url = parts._replace(path=parts.path.rstrip("/") or "/v1", query="", fragment="").geturl()
    names = list_models(url, api_key=api_key)
    if not names:
        raise UserError(f"The server {url} lists no models.", do="load a model in the server first")
    if name is not None and name not in names and PurePath(name).name in names:
        name = PurePath(name).name
    if name is not None and name not in names:
        raise UserError(
            f"The server {url} has no model {shown(name)}.", do=f"choose one of: {', '.join(names)}"
        )
    return ServerModel(url=url, name=name or names[0], api_key=api_key)


def list_models(url: str, *, api_key: str = "") -> list[str]:
    """Return the names of a server's models; `url` ends in /v1."""
    with _open(f"{url}/models", api_key, wait_s=_CONNECT_S) as answer:
        try:
            return [str(model["id"]) for model in parse_json(answer.read(_MAX_BYTES), foreign=True)["data"]]
        except (ValueError, LookupError, TypeError) as error:
            raise _not_openai(url, "its list of models cannot be read") from error


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follow no redirect: the other server would receive the key."""

    def redirect_request(self, *words: Any) -> None:
        return None


@contextlib.contextmanager
def _open(
    url: str, api_key: str, *, data: Mapping[str, Any] | None = None, wait_s: float
) -> Iterator[http.client.HTTPResponse]:
    """Send a request and yield the response; turn failures, also while it is read, into a UserError."""
    headers = {"Content-Type": "application/json"}
    if api_key:  # headers are encoded as latin-1
        headers["Authorization"] = f"Bearer {api_key}".encode().decode("latin-1")
    body = None if data is None else json.dumps(data).encode()
    is_here = urllib.parse.urlsplit(url).hostname in LOOPBACK_NAMES  # not through a proxy
    opener = urllib.request.build_opener(_Stay, *([urllib.request.ProxyHandler({})] if is_here else []))
    try:
        with opener.open(urllib.request.Request(url, body, headers), timeout=wait_s) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        body, moved = error.read(_MAX_REASON_BYTES), error.headers.get("Location")
        if error.code in _MOVED and moved:
            raise UserError(
                f"The server at {url} redirects to {shown(moved)}.",
                do="pass the address of the server itself",
            ) from error
        raise _refused(url, error.code, body, api_key) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerAway(
            f"The server at {url} does not answer.",
            why=f"{reason}.",
            do="check the address, and that the server runs: crosstune serve RUN",
        ) from error


def _refused(url: str, code: int, body: bytes, api_key: str) -> UserError:
    reason = body.decode(errors="replace").strip()
    with contextlib.suppress(ValueError, LookupError, TypeError):
        found = parse_json(body, foreign=True)["error"]
        reason = str(found["message"] if isinstance(found, dict) else found)
    if api_key:  # some servers repeat it, and the reason goes into the log of a run
        reason = reason.replace(api_key, "[key]")
    if code in (401, 403):
        return UserError(
            f"The server at {url} rejects the key.",
            why=reason,
            do="pass the right one: --api_key KEY of a command, CROSSTUNE_REWARD_KEY in the environment for a reward",
        )
    kind = RequestRejected if code in _REJECTED else UserError
    if code in _AWAY or code >= 500:
        kind = ServerAway
    return kind(f"The server at {url} answered with status {code}.", why=reason, do=_ADVICE.get(code, ""))


def _read_stream(answer: http.client.HTTPResponse, url: str, api_key: str) -> Iterator[str]:
    """Yield the text of a stream of server-sent events."""
    has_events = False
    while line := answer.readline(_MAX_BYTES):
        text = line.decode("utf-8", errors="replace").strip()
        if len(line) == _MAX_BYTES:
            raise _not_openai(url, f"it sent a line of more than {_MAX_BYTES >> 20} MiB")
        if not text.startswith("data:"):
            continue
        has_events = True
        if text.removeprefix("data:").strip() == "[DONE]":
            continue
        try:
            event = parse_json(text.removeprefix("data:"), foreign=True)
            if "error" in event:
                raise _refused(url, 500, text.removeprefix("data:").encode(), api_key)
            for choice in event.get("choices") or ():
                if content := (choice.get("delta") or {}).get("content"):
                    yield str(content)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _not_openai(url, f"it sent {shown(text)}") from error
    if not has_events:
        raise _not_openai(url, "it sent no stream of events")


def _not_openai(url: str, why: str) -> UserError:
    return UserError(
        f"The server at {url} does not speak the OpenAI protocol.",
        why=f"{why}.",
        do="pass the address of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1",
    )
