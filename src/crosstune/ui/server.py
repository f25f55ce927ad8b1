"""Answer the requests of the page on this machine. The files of runs are the only state."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from crosstune.core.errors import UserError
from crosstune.files.json_files import check_parsed, parse_json, to_json
from crosstune.files.openai_client import list_models
from crosstune.report.files import RunFiles
from crosstune.ui.actions import Actions
from crosstune.ui.form import describe_form, free_name
from crosstune.ui.guard import Guard, plain
from crosstune.ui.jobs import Jobs, command_line
from crosstune.ui.runs import Changes, Runs

_POLL_S = 1.0
_LONGEST_SLEEP_S = 0.5
_END_S = 5
_STREAMS_AT_FULL_RATE = 8
_BEAT_S = 15.0
_MOST_RUNS = 12
_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def make_server(parent: Path, *, token: str) -> uvicorn.Server:
    """Return the server of a runs folder. Its streams end when it is asked to exit."""
    app = create_app(parent, token=token, is_ending=lambda: server.should_exit)
    config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=_END_S)
    server = uvicorn.Server(config)
    return server


def create_app(parent: Path, *, token: str, is_ending: Callable[[], bool]) -> Starlette:
    """Return the application for the runs of a folder."""
    runs, jobs, streams = Runs(parent), Jobs(parent), _Streams(is_ending)
    actions = Actions(runs, jobs, is_ending)
    static = _read_static(token)

    def get(path: str, answer: Callable[[Request], Any], *, kind: str = "application/json") -> Route:
        def respond(request: Request) -> Response:
            found = answer(request)
            text = found if isinstance(found, str) else to_json(found)
            return _respond(request, text.encode(), kind=kind)

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
            if isinstance(found, Response):
                return found
            return Response(to_json(found), media_type="application/json")

        return Route(path, respond, methods=["POST"])

    def send_static(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in static:
            return plain(404, "There is no such file.")
        return _respond(request, static[name], kind=_TYPES[Path(name).suffix])

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
            get("/api/jobs", lambda _: {"jobs": jobs.listing(), "pace": streams.pace}),
            get("/api/models", lambda request: _models(jobs, request.query_params.get("job", ""))),
            *(post(f"/api/{name}", getattr(actions, name)) for name in Actions.NAMES),
        ],
        exception_handlers={UserError: _show_error, OSError: _show_os_error},
        middleware=[Middleware(Guard, token=token)],
    )
    threading.Thread(target=runs.warm_up, daemon=True).start()
    return app


def _respond(request: Request, text: bytes, *, kind: str) -> Response:
    """Return a text, or that the browser has it already."""
    etag = f'"{hashlib.sha256(text).hexdigest()[:24]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(text, media_type=kind, headers=headers)


def _about(runs: Runs, name: str) -> dict[str, Any]:
    """Return what the page of a run shows beside its report."""
    folder, run = runs.find(name), runs.load(name)[1]
    saved = sorted(
        path.name for path in (folder / "checkpoints").glob("step-*") if (path / "manifest.json").is_file()
    )
    return runs.row(name) | {
        "asked": run.asked,
        "checkpoints": saved,
        "list_command": command_line(["checkpoint", "list", str(folder)]),
        "uses": _uses(run),
    }


def _uses(run: RunFiles) -> list[str]:
    """Return what the page can do with the result of a finished run."""
    result = Path(str(run.summary.get("result"))).name
    if run.summary.get("status") != "finished" or not run.summary.get("generates") or result == "None":
        return []
    return ["chat", *(["merge"] if result == "adapter" else []), "export"]


def _charts(runs: Runs, request: Request) -> str:
    asked = request.query_params
    steps = None
    try:
        smoothing = min(10.0, max(0.0, float(asked.get("smoothing", "1"))))
        if "from" in asked:
            steps = (float(asked["from"]), float(asked["to"]))
    except (ValueError, KeyError) as error:
        raise UserError("The range of steps is not valid.") from error
    return runs.charts(_several(request), smoothing=smoothing, steps=steps)


def _one(request: Request) -> str:
    return str(request.query_params.get("run", ""))


def _several(request: Request) -> list[str]:
    names = request.query_params.getlist("run")
    if not 0 < len(names) <= _MOST_RUNS:
        raise UserError(f"1 to {_MOST_RUNS} runs can be shown at once.")
    return names


class _Streams:
    """The open streams of events. With many of them, each polls less often, and so do their pages, so that training on this
    machine is not slowed down."""

    def __init__(self, is_ending: Callable[[], bool]) -> None:
        self.num_open, self.is_ending = 0, is_ending

    @property
    def pace(self) -> float:
        """The factor by which open pages wait longer."""
        return max(1.0, self.num_open / _STREAMS_AT_FULL_RATE)

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
            wait_s = _POLL_S * self.pace
            quiet_s += wait_s
            while wait_s > 0 and not self.is_ending():
                await asyncio.sleep(min(wait_s, _LONGEST_SLEEP_S))
                wait_s -= _LONGEST_SLEEP_S


def _models(jobs: Jobs, name: str) -> dict[str, Any]:
    """Return the models that a job serves; none while it loads them."""
    job = jobs.read(name)
    names = list_models(f"http://127.0.0.1:{job['port']}/v1") if job["port"] else []
    return {"job": job, "models": names}


def _read_static(token: str) -> dict[str, bytes]:
    """Return the files of the page by name."""
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
    return found


def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    text = to_json({"error": error.message, "why": error.why, "do": error.do})
    return Response(text, status_code=400, media_type="application/json")


def _show_os_error(request: Request, error: Exception) -> Response:
    text = to_json({"error": "A file cannot be read or written.", "why": str(error), "do": "check the disk"})
    return Response(text, status_code=500, media_type="application/json")
