"""`crosstune push`: the card of a run, and a push to a hub on this machine, read back with transformers and PEFT."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from crosstune.cli.main import main
from crosstune.models.bundled import SMOLLM2_HUB
from crosstune.models.file_hashes import SUMS

SECRET = "hf_abcdEFGH1234ijklMNOP5678"
COMMIT = "c" * 40
ROW = "a private sentence of the data"
LOAD = """
import sys
sys.modules["crosstune"] = None  # it cannot be imported
if sys.argv[2] == "adapter":
    from peft import AutoPeftModelForCausalLM as Model
else:
    from transformers import AutoModelForCausalLM as Model
from transformers import AutoTokenizer
model = Model.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
chat = [{"role": "user", "content": "Hello"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1]:]
print("ANSWER", tokenizer.decode(out, skip_special_tokens=True).strip())
"""


@dataclass
class Hub:
    """Repositories in memory, and what was asked."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    uploads: list[str] = field(default_factory=list)
    fails_commit: bool = False


class Handler(http.server.BaseHTTPRequestHandler):
    """The answers of the hub's protocol that a push and a download need."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self._read()
        if self.headers.get("Authorization") != f"Bearer {SECRET}":
            return self._send(401, b"{}")
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            exists = name in self.hub.repos
            self.hub.repos.setdefault(name, {})
            self.hub.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return self._json({"url": f"http://{self.headers['Host']}/{name}"}, status=409 if exists else 200)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "shouldIgnore": False, "uploadMode": _mode(file["path"])}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                if each["oid"] not in self.hub.blobs:
                    each["actions"] = {"upload": {"href": f"http://{self.headers['Host']}/put/{each['oid']}"}}
            return self._json({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            if self.hub.fails_commit:
                return self._send(400, b'{"error": "the disk is full"}')
            return self._commit(found[1], body)
        return self._send(404, b"{}")

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.hub.repos[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.repos[name][value["path"]] = self.hub.blobs[value["oid"]]
        url = f"http://{self.headers['Host']}/{name}"
        self._json({"commitUrl": f"{url}/commit/{COMMIT}", "commitOid": COMMIT, "success": True})

    def do_PUT(self) -> None:
        oid, body = self.path.rpartition("/")[2], self._read()
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.blobs[oid] = body
        self.hub.uploads.append(oid)
        self._send(200, b"")

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/api/whoami-v2":
            known = self.headers.get("Authorization") == f"Bearer {SECRET}"
            return self._json({"name": "me", "type": "user"}) if known else self._send(401, b"{}")
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            data = self.hub.repos.get(found[1], {}).get(found[2])
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            etag = hashlib.sha1(data).hexdigest()
            return self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        if found := re.match(r"/api/models/([^/]+/[^/]+)", path):
            if found[1] not in self.hub.repos:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            files = self.hub.repos[found[1]]
            if "/tree/" in path:
                rows = [
                    {"type": "file", "path": name, "oid": "0", "size": len(data)}
                    for name, data in files.items()
                ]
                return self._json(rows)
            card = {"license": "mit"} if found[1] == "org/base" else {}
            rows = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return self._json({"id": found[1], "sha": COMMIT, "siblings": rows, "cardData": card})
        return self._send(404, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def _json(self, data: Any, status: int = 200) -> None:
        self._send(status, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _mode(name: str) -> str:
    return "lfs" if name.endswith((".safetensors", ".gguf")) else "regular"


@pytest.fixture(scope="module")
def run(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An evaluated run on a local base and a local file."""
    home = tmp_path_factory.mktemp("push")
    rows = [{"prompt": f"{ROW} {n}", "completion": f"{n} and {n}"} for n in range(30)]
    (home / "private-data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "--model_name", str(tiny_model), "--dataset", str(home / "private-data.jsonl")]
    words += ["--train_type", "lora", "--max_steps", "3", "--backend", "cpu", "--precision", "fp32"]
    words += ["--eval_metric", "exact_match", "--output_dir", str(home), "--name", "private-run"]
    assert main(words) == 0
    return home / "private-run"


def published_text(folder: Path) -> str:
    paths = [path for path in folder.iterdir() if path.suffix not in (".safetensors", ".gguf")]
    return "\n".join(path.read_text(encoding="utf-8") for path in paths)


def test_the_card_has_results_and_no_rows_paths_or_secrets(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = json.loads((run / "plan.json").read_text())
    for place in ("asked", "options"):
        plan[place]["lora_target_modules"] = f"q_proj?token={SECRET}"
    (run / "plan.json").write_text(json.dumps(plan))
    words = ["push", str(run), "--to", "me/tuned", "--base", "org/base", "--license", "mit", "--dry_run"]
    assert main([*words, "--out", str(tmp_path / "out"), "--json"]) == 0
    card = json.loads(capsys.readouterr().out)["card"]
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["base_model"] == "org/base" and metadata["license"] == "mit"
    assert metadata["library_name"] == "peft" and metadata["base_model_relation"] == "adapter"
    assert re.search(r"\| held-out exact match \| 0.* \(0\.0 to \d+\.\d\) \|", card)
    assert "| held-out loss |" in card and "| lr |" not in card and "| max_steps | 3 |" in card
    assert "q_proj?token=[secret]" in card
    text = published_text(tmp_path / "out")
    for hidden in (ROW, "private-data", "private-run", SECRET, str(run.parent), str(Path.home()), "/tmp/"):
        assert hidden not in text, hidden
    svg = ElementTree.fromstring((tmp_path / "out" / "loss.svg").read_text())
    assert svg.tag.endswith("svg") and len(list(svg.iter())) > 20
    assert (
        json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
        == "org/base"
    )


def test_only_files_of_a_model_are_published(run: Path, tmp_path: Path) -> None:
    """The bundled model is not exactly its base on the hub: with its identity, `crosstune chat` would reject the hub's."""
    theirs = shutil.copytree(run, tmp_path / "theirs")
    (theirs / "adapter" / SUMS).unlink(missing_ok=True)
    record = json.loads((theirs / "adapter" / "crosstune.json").read_text())
    record["base"]["name"] = "smollm2-135m"
    (theirs / "adapter" / "crosstune.json").write_text(json.dumps(record))
    for name in ("notes.txt", "rows.json"):
        (theirs / "adapter" / name).write_text(json.dumps({"text": ROW}))
    words = ["push", str(theirs), "--to", "me/tuned", "--license", "mit", "--dry_run"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "out" / "crosstune.json").read_text())["base"] == {"name": SMOLLM2_HUB}
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "README.md"} <= found
    assert not found & {"notes.txt", "rows.json"}


def test_what_cannot_be_pushed(
    run: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    for words, reason in (
        ([str(run), "--to", "me/tuned"], "pass the hub id of the same weights with --base"),
        ([str(run), "--to", "tuned", "--base", "org/base"], "pass --to ORG/NAME"),
        ([str(run), "--to", "me/tuned", "--base", "org/base"], "hf auth login"),
        ([str(tiny_model), "--to", "me/tuned"], "is not a run"),
    ):
        assert main(["push", *words]) == 2
        assert reason in capsys.readouterr().err


@pytest.mark.parametrize("what", ["adapter", "merged"])
def test_a_link_out_of_the_run_is_not_published(
    what: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of a stranger could name a secret file of the user."""
    (tmp_path / "key").write_text('{"key": "a secret"}')
    theirs = shutil.copytree(run, tmp_path / "theirs")
    (theirs / "adapter" / SUMS).unlink(missing_ok=True)
    (theirs / "adapter" / "extra.json").symlink_to(tmp_path / "key")
    words = ["push", str(theirs), "--to", "me/tuned", "--base", "org/base", "--license", "mit"]
    assert main([*words, "--what", what, "--dry_run", "--out", str(tmp_path / "out")]) == 2
    assert "extra.json cannot be published" in (said := capsys.readouterr().err) and "do:" in said
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[tuple[Hub, str]]:
    files = {path.name: path.read_bytes() for path in tiny_model.iterdir() if path.is_file()}
    hub = Hub(repos={"org/base": files})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Local", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield hub, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_pushed_models_load_elsewhere_and_a_broken_push_continues(
    run: Path, hub: tuple[Hub, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served, url = hub
    variables = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    variables |= {
        "HF_ENDPOINT": url,
        "HF_TOKEN": SECRET,
        "HF_HOME": str(tmp_path / "mine"),
        "HF_HUB_DISABLE_XET": "1",
    }
    variables |= {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def python(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], env=variables, capture_output=True, text=True, timeout=600
        )

    words = ("-m", "crosstune", "push", str(run), "--to", "me/tuned", "--base", "org/base")
    served.fails_commit = True
    broken = python(*words)
    assert broken.returncode == 2 and "run the same command again" in broken.stderr, broken.stderr
    assert SECRET not in broken.stderr and len(served.uploads) == 1
    served.fails_commit = False
    done = python(*words)
    assert done.returncode == 0 and f"{url}/me/tuned" in done.stdout, done.stderr
    assert len(served.uploads) == 1  # the weights had arrived
    assert served.private["me/tuned"] and b"license: mit" in served.repos["me/tuned"]["README.md"]
    whole = python(*words[:5], "me/whole", *words[6:], "--what", "merged")
    assert whole.returncode == 0 and b"library_name: transformers" in served.repos["me/whole"]["README.md"]
    variables |= {"HF_HOME": str(tmp_path / "theirs")}
    answers = []
    for name, what in (("me/tuned", "adapter"), ("me/whole", "merged")):
        loaded = python("-c", LOAD, name, what)
        assert loaded.returncode == 0, loaded.stderr
        answers.append(loaded.stdout.partition("ANSWER ")[2].strip())
    capsys.readouterr()
    options = ["--backend", "cpu", "--precision", "fp32", "--max_new_tokens", "6", "--json"]
    assert main(["generate", str(run), "--prompt", "Hello", *options]) == 0
    assert answers == 2 * [json.loads(capsys.readouterr().out)["answer"]]
