"""Encode and check the manifest of a checkpoint and its seal, the hash of its bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from crosstune.checkpoint.manifest_fields import wrong_manifest
from crosstune.core.errors import UserError, shown
from crosstune.core.json_files import parse_json, to_json

FORMAT = "crosstune-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
WEIGHTS, MOMENTS, RANDOM = "weights.safetensors", "moments.safetensors", "random.safetensors"
MANIFEST_LIMIT = 64 * 2**20
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class DamagedCheckpoint(UserError):
    """A checkpoint was truncated, changed, or not written by crosstune."""

    def __init__(self, folder: Any, why: str) -> None:
        super().__init__(
            f"The checkpoint {folder} is damaged.",
            why=why,
            do="use an older one (`crosstune checkpoint verify RUN` lists the valid ones), or --resume auto, which finds it",
        )


class UnknownVersion(UserError):
    """A checkpoint has a format version that this crosstune cannot read."""


def encode(fields: Mapping[str, Any]) -> bytes:
    """Return the bytes of manifest.json. NaN becomes null."""
    manifest = {"format": FORMAT, "format_version": VERSION, **fields}
    return (to_json(manifest, indent=1) + "\n").encode()


def seal(manifest: bytes) -> bytes:
    """Return the hash of the manifest as a line in the format of sha256sum."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def decode(raw: bytes, *, seal_found: bytes, folder: Any) -> dict[str, Any]:
    """Return the manifest after checking its seal, version, required fields and file names."""
    if seal_found != seal(raw):
        raise DamagedCheckpoint(folder, f"{MANIFEST} does not match {SEAL}")
    try:
        manifest = parse_json(raw)
    except ValueError as error:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not the manifest of a crosstune checkpoint")
    version = manifest.get("format_version")
    if type(version) is not int or version != VERSION:
        raise UnknownVersion(
            f"The checkpoint {folder} has format version {shown(version)}.",
            why=f"this crosstune reads version {VERSION}, and guessing could lose state.",
            do="use the version of crosstune that wrote it, or a newer one",
        )
    wrong = wrong_manifest(manifest)
    if wrong is not None:
        raise DamagedCheckpoint(folder, f"{MANIFEST} is not valid: {wrong}")
    for name, facts in manifest["files"].items():
        _check_file(name, facts, folder)
    return manifest


def _check_file(name: str, facts: Any, folder: Any) -> None:
    plain = _FILE_NAME.fullmatch(name) is not None and ".." not in name and name not in (MANIFEST, SEAL)
    if not plain:
        raise DamagedCheckpoint(folder, f"{shown(name)} is not a plain file name")
    size, digest = (facts.get("bytes"), facts.get("sha256")) if isinstance(facts, dict) else (None, None)
    good_size = isinstance(size, int) and not isinstance(size, bool) and size >= 0
    if not good_size or not isinstance(digest, str) or re.fullmatch(r"[0-9a-f]{64}", digest) is None:
        raise DamagedCheckpoint(folder, f"{MANIFEST} has no valid size and hash for {name}")
