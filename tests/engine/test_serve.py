"""`crosstune serve` with the official client: a run and its base on llama.cpp, many clients, keys, and the end."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from support import tuned_run

from crosstune.cli.main import main

openai = pytest.importorskip("openai")
pytest.importorskip("xllamacpp")

pytestmark = pytest.mark.slow
PROMPTS = [f"{verb} the {thing}." for verb in ("Open", "Close") for thing in ("lamp", "door", "fan", "blind")]
NUM_TOKENS = 12
KEY = "a-key-for-tests"


@dataclass(frozen=True, kw_only=True)
class Served:
    program: warm.Program
    url: str
    run: Path
    model: Path
    variables: dict[str, str]

    def client(self, key: str = KEY) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def stream(self, prompt: str, *, model: str = "tuned", leave_after: int | None = None) -> str:
        """Return the streamed answer, or its start if the client leaves after some of its parts."""
        parts: list[str] = []
        answer = self.client().chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=2000 if leave_after else NUM_TOKENS,
            temperature=0,
            stream=True,
        )
        with answer:
            for event in answer:
                assert event.model == model
                parts += [choice.delta.content or "" for choice in event.choices]
                if leave_after is not None and len(parts) >= leave_after:
                    break
        return "".join(parts).strip()


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run of a few steps and its base model, served together."""
    home = tmp_path_factory.mktemp("serve")
    rows = [{"prompt": prompt, "completion": f"{prompt[:-1].lower()} now"} for prompt in PROMPTS]
    run = tuned_run(home, tiny_model, rows, steps=60)
    variables = {"CROSSTUNE_CACHE": str(home / "cache")}
    served = start(run, tiny_model, variables)
    try:
        yield served
    finally:
        served.program.kill()


def start(run: Path, model: Path, variables: dict[str, str]) -> Served:
    words = ["serve", str(run), "--also", str(model), "--port", "0", "--threads", "1", "--api_key", KEY]
    program = warm.start(warm.MAIN, *words, "--context_length", "256", variables=variables)
    until = time.monotonic() + 600
    while "ready  " not in program.said():
        assert program.poll() is None and time.monotonic() < until, program.said()
        time.sleep(0.1)
    url = program.said().partition("ready    ")[2].partition("/v1")[0]
    return Served(program=program, url=url, run=run, model=model, variables=variables)


def test_eight_clients_stream_the_answers_of_generate_while_one_leaves(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    words = [
        "--prompt_file",
        str(tmp_path / "prompts.txt"),
        "--backend",
        "cpu",
        "--precision",
        "fp32",
        "--json",
    ]
    capsys.readouterr()
    assert main(["generate", str(served.run), *words, "--max_new_tokens", str(NUM_TOKENS)]) == 0
    wanted = [row["answer"] for row in json.loads(capsys.readouterr().out)["answers"]]
    assert len(set(wanted)) > 4  # the run has learned to tell the prompts apart
    with ThreadPoolExecutor(9) as pool:
        leaving = pool.submit(served.stream, PROMPTS[0], leave_after=2)
        answers = list(pool.map(served.stream, PROMPTS))
        leaving.result()
    assert answers == wanted
    assert served.stream(PROMPTS[1]) == wanted[1]  # the slot of the client that left is free again


def test_two_models_have_their_own_names_and_answers(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == ["tuned", served.model.name]
    assert served.stream(PROMPTS[0], model=served.model.name) != served.stream(PROMPTS[0])
    with pytest.raises(openai.NotFoundError, match=f"the models are: tuned, {served.model.name}"):
        served.client().chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])


def test_only_the_key_and_loopback_open_the_server(served: Served) -> None:
    with pytest.raises(openai.AuthenticationError):
        served.client(key="wrong").models.list()
    port = int(served.url.rpartition(":")[2])
    rebound = http.client.HTTPConnection("127.0.0.1", port)
    rebound.request("GET", "/v1/models", headers={"Host": "evil.example", "Authorization": f"Bearer {KEY}"})
    assert rebound.getresponse().status == 403
    processes = [psutil.Process(served.program.pid)]
    processes += processes[0].children(recursive=True)
    listening = [
        place.laddr
        for process in processes
        for place in process.net_connections()
        if place.status == psutil.CONN_LISTEN
    ]
    assert len(listening) == 3 and {address.ip for address in listening} == {"127.0.0.1"}
    engine = next(address.port for address in listening if address.port != port)
    direct = http.client.HTTPConnection("127.0.0.1", engine)
    direct.request("POST", "/v1/chat/completions", "{}", {"Content-Type": "application/json"})
    assert direct.getresponse().status == 401


def test_chat_with_a_server(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{PROMPTS[2]}\n"))
    words = ["chat", "tuned", "--server", served.url, "--max_new_tokens", str(NUM_TOKENS)]
    assert main([*words, "--api_key", KEY]) == 0
    assert capsys.readouterr().out.strip() == served.stream(PROMPTS[2])
    assert main([*words, "--api_key", "wrong"]) == 2
    assert "rejects the key" in capsys.readouterr().err
    assert main(["chat", "other", "--server", served.url, "--api_key", KEY]) == 2
    assert f"choose one of: tuned, {served.model.name}" in capsys.readouterr().err


def test_a_used_port_is_said_before_anything_is_loaded(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    port = served.url.rpartition(":")[2]
    assert main(["serve", "absent", "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"Cannot listen on 127.0.0.1, port {port}" in said and "--port" in said


def test_sigterm_ends_everything_and_an_intact_export_is_kept(served: Served) -> None:
    children = psutil.Process(served.program.pid).children(recursive=True)
    cache = served.run.parent / "cache" / "models"
    exports = {path: path.stat().st_ino for path in cache.glob("*-gguf-*/model.gguf")}
    assert len(children) == 2 and len(exports) == 2
    os.kill(served.program.pid, signal.SIGTERM)
    code, said = served.program.end()
    assert code == 0 and "stopping" in said and "Traceback" not in said
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(served.url.rpartition(":")[2]))) != 0
    damaged, kept = sorted(exports)
    data = damaged.read_bytes()
    damaged.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    again = start(served.run, served.model, served.variables)
    try:
        assert kept.stat().st_ino == exports[kept]
        assert damaged.read_bytes() == data, "a damaged export is made again"
        assert again.stream(PROMPTS[0])
        orphans = psutil.Process(again.program.pid).children(recursive=True)
    finally:
        again.program.kill()
    gone, alive = psutil.wait_procs(orphans, timeout=60)
    assert len(gone) == 2 and not alive  # even without a chance to clean up
