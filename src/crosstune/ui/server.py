"""Answer the page's requests: guarded by a token, on loopback only, with the files of runs as the only state."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import http.client
import json
import re
import secrets
import threading
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crosstune.core.errors import UserError
from crosstune.core.quantization import GGUF_TYPES
from crosstune.files.atomic_files import write_text
from crosstune.files.json_files import check_parsed, parse_json, to_json
from crosstune.files.plain_files import read_plain_text
from crosstune.results.export import FORMATS
from crosstune.ui.form import check_form, describe_form, free_name, read_words, reserve_name
from crosstune.ui.jobs import FOLDER, Asked, Jobs
from crosstune.ui.runs import Changes, Runs

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BODY_BYTES = 1 << 20
_POLL_S = 1.0
_LONGEST_SLEEP_S = 0.5
_END_S = 5
_STREAMS_AT_FULL_RATE = 8
_BEAT_S = 15.0
_MOST_RUNS = 12
_ANSWER_S = 3600.0
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_CLOSED = "This page needs the address that `crosstune ui` printed, with its token: open that address once.\n"


class Guard:
    """Refuse requests without the token, of other hosts or pages, and with large bodies; add the headers of the policy."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self.app, self.token = app, token
        self.cookie = f"crosstune_{hashlib.sha256(token.encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        request = Request(scope)
        if (refused := self._refuse(request)) is not None:
            await refused(scope, receive, send_guarded)
            return
        taken = 0

        async def receive_limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MOST_BODY_BYTES:
                raise _TooLargeError
            return message

        try:
            await self.app(scope, receive_limited, send_guarded)
        except ClientDisconnect:
            pass  # it left before it had sent all
        except _TooLargeError:
            await _plain(413, "The request is too large.")(scope, receive, send_guarded)

    def _refuse(self, request: Request) -> Response | None:
        headers, is_start = request.headers, request.url.path == "/"
        host = headers.get("host", "")
        try:
            origin, name = (
                urllib.parse.urlsplit(headers.get("origin", "")),
                urllib.parse.urlsplit(f"//{host}").hostname,
            )
        except ValueError:
            return _plain(400, "The headers of the request are damaged.")
        if name not in LOOPBACK:
            return _plain(403, "This page answers on this machine's own address only.")
        is_other = "origin" in headers and (origin.scheme != "http" or origin.netloc != host)
        if is_other or (
            headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not is_start
        ):
            return _plain(403, "Requests of other pages are refused.")
        if request.method not in ("GET", "HEAD", "POST"):
            return _plain(405, "There is no such method.")
        if is_start and self._is_token(request.query_params.get("token", "")):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", max_age=400 * 86400)
            return answer
        if not self._is_token(request.cookies.get(self.cookie, "")):
            return _plain(401, _CLOSED)
        if request.method == "POST" and not self._is_token(headers.get("x-crosstune-token", "")):
            return _plain(403, "Changes need the token of the page.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 12 or int(length) > MOST_BODY_BYTES:
            return _plain(413, "The request is too large.")
        return None

    def _is_token(self, sent: str) -> bool:
        return hmac.compare_digest(sent.encode(), self.token.encode())


class _TooLargeError(Exception):
    """A body without a length went on beyond the limit."""


def _plain(status: int, text: str) -> Response:
    return PlainTextResponse(text, status_code=status)


def read_token(parent: Path) -> str:
    """Return the token of a runs folder, made once: an open page finds its server again after a restart."""
    path = parent / FOLDER / "token"
    try:
        found, mode = read_plain_text(path, limit=1 << 10).strip(), path.stat().st_mode
    except UserError:
        found, mode = "", 0
    if not re.fullmatch(r"[\w-]{32,}", found, re.ASCII) or mode & 0o077:
        found = secrets.token_urlsafe(32)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        write_text(path, found + "\n")
        path.chmod(0o600)
    return found


def make_server(parent: Path, *, token: str) -> uvicorn.Server:
    """Return the server of a runs folder. Its streams end when it is asked to exit."""
    app = create_app(parent, token=token, is_ending=lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=_END_S)
    server = uvicorn.Server(config)
    return server


def create_app(parent: Path, *, token: str, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application for the runs of a folder."""
    runs, jobs, streams = Runs(parent), Jobs(parent), _Streams(is_ending)
    actions = _Actions(runs, jobs, is_ending)
    static = _read_static(token)

    def get(path: str, answer: Callable[[Request], Any], *, kind: str = "application/json") -> Route:
        def respond(request: Request) -> Response:
            found = answer(request)
            text = found if isinstance(found, str) else to_json(found)
            etag = f'"{hashlib.sha256(text.encode()).hexdigest()[:24]}"'
            headers = {"ETag": etag, "Cache-Control": "no-cache"}
            if request.headers.get("if-none-match") == etag:
                return Response(status_code=304, headers=headers)
            return Response(text, media_type=kind, headers=headers)

        return Route(path, respond, methods=["GET"])

    def post(path: str, answer: Callable[[Mapping[str, Any]], Any]) -> Route:
        async def respond(request: Request) -> Response:
            try:
                text = (await request.body()).decode()
                asked = parse_json(text)
                check_parsed(asked, text, foreign=True)
            except ValueError:
                asked = None
            if not isinstance(asked, dict):
                raise UserError("The request is not a JSON object.")
            found = await run_in_threadpool(answer, asked)
            return (
                found
                if isinstance(found, Response)
                else Response(to_json(found), media_type="application/json")
            )

        return Route(path, respond, methods=["POST"])

    def send_static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in static:
            return _plain(404, "There is no such file.")
        text, etag = static[name]
        headers = {"ETag": etag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(text, media_type=_TYPES[Path(name).suffix], headers=headers)

    async def stream(request: Request) -> Response:
        name, after = (
            _one(request),
            request.headers.get("last-event-id") or request.query_params.get("after", ""),
        )
        await run_in_threadpool(runs.find, name)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            streams.follow(request, partial(runs.changes, name), after),
            media_type="text/event-stream",
            headers=headers,
        )

    app = Starlette(
        routes=[
            Route("/", send_static),
            Route("/static/{name:path}", send_static),
            get("/api/runs", lambda request: runs.listing(request.query_params.get("in", ""))),
            get("/api/run", lambda request: _about(runs, _one(request))),
            get("/api/page", lambda request: runs.page(_one(request)), kind="text/html"),
            get("/api/charts", lambda request: _charts(runs, request)),
            get("/api/compare", lambda request: runs.compare(_several(request)), kind="text/html"),
            get(
                "/api/poll",
                lambda request: runs.changes(_one(request), request.query_params.get("after", "")).text,
            ),
            Route("/api/events", stream),
            get("/api/form", lambda _: describe_form() | {"name": free_name(runs.parent)}),
            get("/api/jobs", lambda _: {"jobs": jobs.listing()}),
            get("/api/models", lambda request: _models(jobs, request.query_params.get("job", ""))),
            *(post(f"/api/{name}", getattr(actions, name)) for name in _Actions.NAMES),
        ],
        exception_handlers={UserError: _show_error, OSError: _show_os_error},
        middleware=[Middleware(Guard, token=token)],
    )
    threading.Thread(target=runs.warm_up, daemon=True).start()
    return app


class _Actions:
    """What the page can do; each starts or asks an ordinary command."""

    NAMES = ("check", "plan", "data", "train", "resume", "stop", "merge", "export", "serve", "chat")

    def __init__(self, runs: Runs, jobs: Jobs, is_ending: Callable[[], bool]) -> None:
        self.runs, self.jobs, self.asked, self.is_ending = runs, jobs, Asked(), is_ending

    def check(self, asked: Mapping[str, Any]) -> Any:
        return check_form(asked.get("options"), output_dir=self.runs.parent)

    def plan(self, asked: Mapping[str, Any]) -> Any:
        return self.asked.ask(["plan", *self._words(asked)])

    def data(self, asked: Mapping[str, Any]) -> Any:
        return self.asked.ask(["data", *read_words(asked.get("options")), "--show", "8"])

    def train(self, asked: Mapping[str, Any]) -> Any:
        checked = self.check(asked)
        if checked["problems"]:
            raise UserError("The options have problems.", why=checked["problems"][0]["message"])
        options = dict(asked["options"])
        name = str(options.get("name", "")).strip() or reserve_name(self.runs.parent)
        words = read_words(options | {"name": name})
        return self._start(
            "train", ["train", *words, "--output_dir", str(self.runs.parent)], self.runs.parent / name
        )

    def resume(self, asked: Mapping[str, Any]) -> Any:
        folder = self._run(asked)
        words = ["train", "--resume", str(folder), *read_words(asked.get("options", {}))]
        return self._start("train", words, folder)

    def stop(self, asked: Mapping[str, Any]) -> Any:
        if "job" in asked:
            self.jobs.stop(str(asked["job"]))
        else:
            self.jobs.stop_run(self._run(asked))
        return {}

    def merge(self, asked: Mapping[str, Any]) -> Any:
        return self._start("merge", ["merge", str(self._run(asked))], self._run(asked))

    def export(self, asked: Mapping[str, Any]) -> Any:
        folder, to, kind = self._run(asked), asked.get("to"), asked.get("gguf_type") or ""
        if to not in FORMATS or kind not in ("", "auto", *GGUF_TYPES):
            raise UserError("A run cannot be exported like this.", do="see: crosstune export --help")
        words = ["export", str(folder), "--to", to, *(["--gguf_type", kind] if kind else [])]
        return self._start("export", words, folder)

    def serve(self, asked: Mapping[str, Any]) -> Any:
        found = asked.get("models")
        names = [str(name) for name in found][:4] if isinstance(found, list) else []
        if not names or any(name.startswith("-") or "\0" in name for name in names):
            raise UserError("No model was chosen.", do="choose a run or a model")
        first, *others = [self._model(name) for name in names]
        also = [word for other in others for word in ("--also", other)]
        return self.jobs.start("serve", ["serve", first, *also, "--port", "0"], target=", ".join(names))

    def chat(self, asked: Mapping[str, Any]) -> Any:
        """Stream an answer of a model that a job serves."""
        port = self.jobs.read(str(asked.get("job", "")))["port"]
        if port is None:
            raise UserError("The model is no longer served.", do="start the chat again")
        known = ("model", "messages", "max_tokens", "temperature", "seed")
        body = {key: asked[key] for key in known if key in asked} | {"stream": True}
        return StreamingResponse(
            _answer(port, body, self.is_ending),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )

    def _start(self, kind: str, words: list[str], folder: Path) -> dict[str, Any]:
        return self.jobs.start(kind, [*words, "--json"], target=str(folder))

    def _words(self, asked: Mapping[str, Any]) -> list[str]:
        return [*read_words(asked.get("options")), "--output_dir", str(self.runs.parent)]

    def _run(self, asked: Mapping[str, Any]) -> Path:
        return self.runs.find(str(asked.get("run", "")))

    def _model(self, name: str) -> str:
        """Return the folder of a run, or a model's name as it is."""
        try:
            return str(self.runs.find(name))
        except UserError:
            return name


def _about(runs: Runs, name: str) -> dict[str, Any]:
    """Return what the page of a run shows beside its report."""
    folder = runs.find(name)
    asked = runs.load(name)[1].asked
    saved = sorted(
        path.name for path in (folder / "checkpoints").glob("step-*") if (path / "manifest.json").is_file()
    )
    return runs.row(name) | {"asked": asked, "checkpoints": saved}


def _charts(runs: Runs, request: Request) -> str:
    asked = request.query_params
    steps = None
    try:
        smoothing = min(10.0, max(0.0, float(asked.get("smoothing", "1"))))
        if "from" in asked:
            steps = (float(asked["from"]), float(asked["to"]))
    except (ValueError, KeyError) as error:
        raise UserError("The range of steps cannot be read.") from error
    return runs.charts(_several(request), smoothing=smoothing, steps=steps)


def _one(request: Request) -> str:
    return str(request.query_params.get("run", ""))


def _several(request: Request) -> list[str]:
    names = request.query_params.getlist("run")
    if not 0 < len(names) <= _MOST_RUNS:
        raise UserError(f"1 to {_MOST_RUNS} runs can be shown at once.")
    return names


class _Streams:
    """The open streams of events. With many, each is slower: a training on this machine does not feel them."""

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self.num_open, self.is_ending = 0, is_ending

    async def follow(
        self, request: Request, changes: Callable[[str], Changes], after: str
    ) -> AsyncIterator[str]:
        """Yield what was added to a run as server-sent events; the id of each is the position after it."""
        self.num_open += 1
        try:
            async for text in self._follow(request, changes, after):
                yield text
        finally:
            self.num_open -= 1

    async def _follow(
        self, request: Request, changes: Callable[[str], Changes], after: str
    ) -> AsyncIterator[str]:
        status, quiet_s = "", 0.0
        yield "retry: 1000\n\n"
        while not self.is_ending() and not await request.is_disconnected():
            try:
                found = await run_in_threadpool(changes, after)
            except UserError as error:
                yield f"event: gone\ndata: {json.dumps(error.message)}\n\n"
                return
            if (found.position, found.status) != (after, status):
                after, status, quiet_s = found.position, found.status, 0.0
                yield f"id: {after}\ndata: {found.text}\n\n"
            elif quiet_s >= _BEAT_S:
                quiet_s = 0.0
                yield ": still here\n\n"
            wait_s = _POLL_S * max(1.0, self.num_open / _STREAMS_AT_FULL_RATE)
            quiet_s += wait_s
            while wait_s > 0 and not self.is_ending():
                await asyncio.sleep(min(wait_s, _LONGEST_SLEEP_S))
                wait_s -= _LONGEST_SLEEP_S


def _models(jobs: Jobs, name: str) -> dict[str, Any]:
    """Return the models that a job serves; none while it loads them."""
    job = jobs.read(name)
    names: list[str] = []
    if job["state"] == "ready" and job["port"]:
        server = http.client.HTTPConnection("127.0.0.1", job["port"], timeout=10)
        try:
            server.request("GET", "/v1/models")
            names = [str(each["id"]) for each in json.loads(server.getresponse().read())["data"]]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise UserError("The server of the models does not answer.", why=str(error)) from error
        finally:
            server.close()
    return {"job": job, "models": names}


def _answer(port: int, body: Mapping[str, Any], is_ending: Callable[[], bool]) -> Iterator[bytes]:
    """Yield a server's answer as it arrives. A closed page closes the connection, and the model stops."""
    server = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        server.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = server.getresponse()
        while not is_ending() and (block := answer.read1(1 << 14)):
            yield block
    except (OSError, http.client.HTTPException) as error:
        yield f"data: {json.dumps({'error': {'message': f'The server stopped: {error}'}})}\n\n".encode()
    finally:
        server.close()


def _read_static(token: str) -> dict[str, tuple[bytes, str]]:
    """Return the files of the page by name, with their tags."""
    own, report = resources.files("crosstune.ui") / "static", resources.files("crosstune.report")
    folders = (("", own), ("uplot/", own / "uplot"))
    found = {
        f"{before}{file.name}": file.read_bytes()
        for before, folder in folders
        for file in folder.iterdir()
        if Path(file.name).suffix in _TYPES
    }
    found |= {
        "report.css": (report / "style.css").read_bytes(),
        "report.js": (report / "script.js").read_bytes(),
    }
    found["index.html"] = found["index.html"].replace(b"{{token}}", token.encode())
    return {name: (text, f'"{hashlib.sha256(text).hexdigest()[:24]}"') for name, text in found.items()}


def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    text = to_json({"error": error.message, "why": error.why, "do": error.do})
    return Response(text, status_code=400, media_type="application/json")


def _show_os_error(request: Request, error: Exception) -> Response:
    text = to_json({"error": "A file cannot be read or written.", "why": str(error), "do": "check the disk"})
    return Response(text, status_code=500, media_type="application/json")
