"""The actions of the page: check a form, plan, train, stop, export, serve, chat."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.responses import StreamingResponse

from crosstune.core.errors import UserError
from crosstune.core.quantization import GGUF_TYPES
from crosstune.results.export import FORMATS
from crosstune.ui.form import check_form, read_words, reserve_name
from crosstune.ui.jobs import CommandWorker, Jobs
from crosstune.ui.runs import Runs

_ANSWER_S = 3600.0


class Actions:
    """Each action starts an ordinary command, or waits for its answer."""

    NAMES = ("check", "plan", "data", "train", "resume", "stop", "merge", "export", "serve", "chat")

    def __init__(self, runs: Runs, jobs: Jobs, is_ending: Callable[[], bool]) -> None:
        self.runs, self.jobs, self.worker, self.is_ending = runs, jobs, CommandWorker(), is_ending

    def check(self, asked: Mapping[str, Any]) -> Any:
        return check_form(asked.get("options"), output_dir=self.runs.parent)

    def plan(self, asked: Mapping[str, Any]) -> Any:
        return self.worker.run(
            ["plan", *read_words(asked.get("options")), "--output_dir", str(self.runs.parent)]
        )

    def data(self, asked: Mapping[str, Any]) -> Any:
        return self.worker.run(["data", *read_words(asked.get("options")), "--show", "8"])

    def train(self, asked: Mapping[str, Any]) -> Any:
        checked = self.check(asked)
        if checked["problems"]:
            raise UserError("Some options are not valid.", why=checked["problems"][0]["message"])
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

    def _run(self, asked: Mapping[str, Any]) -> Path:
        return self.runs.find(str(asked.get("run", "")))

    def _model(self, name: str) -> str:
        """Return the folder of a run, or a model's name as it is."""
        try:
            return str(self.runs.find(name))
        except UserError:
            return name


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
