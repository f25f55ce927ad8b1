"""Serve models: listen immediately, prepare each model, start its engine server, and wait for the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from crosstune.backends._host import num_cores
from crosstune.core.errors import UserError
from crosstune.core.events import Observer
from crosstune.files.plain_files import readable_bytes
from crosstune.serve.engine_child import START
from crosstune.serve.engines import ENGINES, Command, Launch, choose_engine
from crosstune.serve.prepare import Prepared, prepare
from crosstune.serve.router import LOOPBACK, Router, Upstream

DEFAULT_CONTEXT = 4096
_POLL_S = 0.2
_END_S = 10.0
"""Seconds for an engine to end by itself before it is killed."""
_LOG_LINES = 3


@dataclass(frozen=True, kw_only=True)
class ServeRequest:
    targets: Sequence[str]
    engine: str = "auto"
    num_slots: int = 4
    context_length: int | None = None
    num_threads: int | None = None


@contextlib.contextmanager
def serving(
    request: ServeRequest, router: Router, *, observer: Observer, say: Callable[[str], None]
) -> Iterator[list[Child]]:
    """Start the engines of a request behind the router; end them after the `with` block."""
    engine = choose_engine(request.engine, request.targets)
    prepared = _with_unique_names([prepare(each, engine, observer=observer) for each in request.targets])
    with contextlib.ExitStack() as stack:
        children = []
        for each in prepared:
            title = f"{each.name} with {ENGINES[engine].title}, {readable_bytes(each.size_bytes)}"
            say(f"loading  {title} ...")
            launch = _launch(each, request, num_models=len(prepared))
            children.append(stack.enter_context(_child(launch, ENGINES[engine].command(launch))))
        for child in children:  # they load at the same time
            child.wait_ready()
        for child in children:
            launch, command = child.launch, child.command
            upstream = Upstream(port=launch.port, model=command.model, api_key=launch.api_key)
            router.routes.models[launch.name] = upstream
            if launch.adapter is not None:  # the same vLLM server has its base
                base = f"{launch.name}-base"
                router.routes.models[base] = replace(upstream, model=base)
        yield children


def _launch(prepared: Prepared, request: ServeRequest, *, num_models: int) -> Launch:
    context = request.context_length or min(DEFAULT_CONTEXT, prepared.context or DEFAULT_CONTEXT)
    if prepared.context is not None and context > prepared.context:
        raise UserError(
            f"--context_length {context} is too long for {prepared.name}.",
            why=f"the model has a context of {prepared.context} tokens.",
            do=f"use --context_length {prepared.context} or less",
        )
    names = ("name", "path", "adapter", "rank", "tokenizer")
    return Launch(
        **{name: getattr(prepared, name) for name in names},
        port=_free_port(),
        api_key=secrets.token_urlsafe(24),
        num_slots=request.num_slots,
        context_length=context,
        num_threads=request.num_threads or num_cores(),
        num_models=num_models,
    )


def _with_unique_names(models: Sequence[Prepared]) -> list[Prepared]:
    """Number the models that share a name."""
    named: dict[str, Prepared] = {}
    for model in models:
        name, number = model.name, 1
        while name in named:
            number += 1
            name = f"{model.name}-{number}"
        named[name] = replace(model, name=name)
    return list(named.values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class Child:
    """The process of an engine server."""

    launch: Launch
    command: Command
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    def wait_ready(self) -> None:
        """Return when the engine has answered a chat of one token; raise a UserError if it cannot."""
        while True:
            self.check_alive()
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("GET", "/health")[0] == 200:
                    break
            time.sleep(_POLL_S)
        asked = {
            "model": self.command.model,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": "Hi"}],
        }
        try:
            status, answer = self._ask("POST", "/v1/chat/completions", asked)
        except (OSError, http.client.HTTPException) as error:
            status, answer = 0, str(error)
        if status != 200:
            raise UserError(
                f"The engine cannot answer with {self.launch.name}.",
                why=f"{answer.strip()[:600]} {self._last_lines()}".strip(),
                do="try a different --engine",
            )

    def check_alive(self) -> None:
        """Raise a UserError if the process exited."""
        if (code := self.process.poll()) is not None:
            raise UserError(
                f"The engine server of {self.launch.name} exited with code {code}.",
                why=self._last_lines() or "it printed nothing.",
                do="try a different --engine, a smaller --context_length, or a smaller model",
            )

    def _ask(self, method: str, path: str, data: dict[str, Any] | None = None) -> tuple[int, str]:
        engine = http.client.HTTPConnection(LOOPBACK, self.launch.port, timeout=600 if data else 5)
        headers = {"Authorization": f"Bearer {self.launch.api_key}", "Content-Type": "application/json"}
        with contextlib.closing(engine):
            engine.request(method, path, json.dumps(data) if data else None, headers)
            answer = engine.getresponse()
            return answer.status, answer.read().decode(errors="replace")

    def _last_lines(self) -> str:
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines()]
        return " ".join([line for line in lines if line.strip("^~ ")][-_LOG_LINES:])  # no marks of tracebacks


@contextlib.contextmanager
def _child(launch: Launch, command: Command) -> Iterator[Child]:
    """Start an engine server in its own session; end it, with all of its processes, after the `with` block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal reaches only the parent
        )
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(asdict(command)).encode() + b"\n")
            process.stdin.flush()
            yield Child(launch=launch, command=command, process=process, log=log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with contextlib.suppress(OSError):
                process.stdin.close()  # the end of file makes the child kill its group
            process.wait()
