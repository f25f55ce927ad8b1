"""Serve models: listen immediately, turn each model into files for an engine, start its engine server, and wait for the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from crosstune.backends._host import memory_bytes
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.events import Observer, Warned
from crosstune.distributed.master import free_ports
from crosstune.files.plain_files import readable_bytes
from crosstune.models.folder import longest_context
from crosstune.models.gguf_metadata import check_header
from crosstune.models.quantized_folder import dense_bytes, read_quantization
from crosstune.process.limited_child import main_of
from crosstune.process.this_process import num_cores
from crosstune.results.export import cached_export, name_of
from crosstune.runs.open_parts import find_model
from crosstune.runs.trained_folder import check_base, find_trained
from crosstune.serve.engines import ENGINES, Command, Launch, Prepared, choose_engine, is_gguf, takes_adapter
from crosstune.serve.router import LOOPBACK, Router, Upstream

_OVERHEAD = 1.1
"""Memory of a served model per byte of its weights: buffers and a small context."""


def prepare(target: str, engine: str, *, observer: Observer) -> Prepared:
    """Find the model of a target and export it for the engine, unless the engine reads it directly."""
    if is_gguf(target):
        path = Path(target).expanduser().absolute()
        facts = check_header(path)
        check_memory(target, path.stat().st_size)
        _note_template(target, facts, observer)
        context = facts.get(f"{facts.get('general.architecture')}.context_length")
        context = context if isinstance(context, int) and context > 0 else None
        return Prepared(name=path.stem, path=path, context=context)
    trained = find_trained(target)
    model = find_model(make_config(**trained.options()), observer)
    for sentence in check_base(trained, model):
        observer.on_event(Warned(message=sentence))
    if engine in ("llamacpp", "mlx"):  # on the host's memory
        check_memory(target, dense_bytes(model.path, "auto"))
    context, name = longest_context(model.path), name_of(target, trained)
    if takes_adapter(engine, trained):
        tokenizer = trained.tokenizer_folder(model.path)
        return Prepared(
            name=name,
            path=model.path,
            context=context,
            adapter=trained.adapter,
            rank=int(trained.settings["r"]),
            tokenizer=tokenizer if tokenizer != model.path else None,
        )
    form = ENGINES[engine].form
    if trained.adapter is None and _reads(form, model.path):
        return Prepared(name=name, path=model.path, context=context)
    path = cached_export(target, trained, model, form, observer=observer)
    if form == "gguf":
        _note_template(target, check_header(path), observer)
    return Prepared(name=name, path=path, context=context)


def _note_template(target: str, header: Mapping[str, Any], observer: Observer) -> None:
    if "tokenizer.chat_template" not in header:
        message = (
            f"{target} has no chat template: llama.cpp writes the turns of a chat in its own format (ChatML)"
        )
        observer.on_event(Warned(message=message))


def check_memory(target: str, weight_bytes: int) -> None:
    """Raise a UserError for weights that exceed the free memory."""
    need, (total, free) = int(weight_bytes * _OVERHEAD), memory_bytes()
    if need > free:
        raise UserError(
            f"{target} does not fit into the memory of this machine.",
            why=f"its weights need about {readable_bytes(need)}; {readable_bytes(free)} of {readable_bytes(total)} "
            "are free.",
            do="close other programs, or serve a smaller file: crosstune export ... --to gguf --gguf_type q8_0",
        )


def _reads(form: str, folder: Path) -> bool:
    """Return True if an engine for this format reads a model folder directly."""
    held = read_quantization(folder)
    return form != "gguf" and (held is None or (form == "mlx" and held.spec.quantizer == "mlx"))


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
            say(f"loading  {each.name} with {ENGINES[engine].title} ...")
            launch = _launch(each, request, num_models=len(prepared))
            children.append(stack.enter_context(_child(launch, ENGINES[engine].command(launch))))
        for child in children:  # they load at the same time
            child.wait_ready()
        for child in children:
            model = child.launch.model
            upstream = Upstream(
                port=child.launch.port, model=child.command.model, api_key=child.launch.api_key
            )
            router.models[model.name] = upstream
            if model.adapter is not None:  # the same vLLM server has its base
                router.models[f"{model.name}-base"] = replace(upstream, model=f"{model.name}-base")
        yield children


def _launch(prepared: Prepared, request: ServeRequest, *, num_models: int) -> Launch:
    context = request.context_length or min(DEFAULT_CONTEXT, prepared.context or DEFAULT_CONTEXT)
    if prepared.context is not None and context > prepared.context:
        raise UserError(
            f"--context_length {context} is too long for {prepared.name}.",
            why=f"the model has a context of {prepared.context} tokens.",
            do=f"use --context_length {prepared.context} or less",
        )
    return Launch(
        model=prepared,
        port=free_ports(1)[0],
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
                f"The engine cannot answer with {self.launch.model.name}.",
                why=f"{answer.strip()[:600]} {self._last_lines()}".strip(),
                do="try a different --engine",
            )

    def check_alive(self) -> None:
        """Raise a UserError if the process exited."""
        if (code := self.process.poll()) is not None:
            raise UserError(
                f"The engine server of {self.launch.model.name} exited with code {code}.",
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
            main_of("crosstune.serve.engine_child"),
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
