"""Pack a run into a tar file; unpack one after checking all names and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import Any

from crosstune.core.errors import UserError, shown
from crosstune.files.atomic_files import put_new, staged_file, staging_folder
from crosstune.files.json_fields import NOTHING, OBJECT, TEXT, map_of, real, whole, wrong_field
from crosstune.files.json_files import parse_json, read_json
from crosstune.files.plain_files import (
    UnreadableFile,
    disk_full_reason,
    file_sha256,
    free_space,
    is_file_name,
    open_plain,
    readable_bytes,
    room_advice,
)

SUFFIX = ".crosstune.tar"
NOTE = "move.json"
DATA_OPTIONS = ("dataset", "eval_dataset")
"""Options that may name several files."""
PACKED_OPTIONS = (*DATA_OPTIONS, "mlx_config", "chat_template", "tokenizer")
"""Options whose files are packed into an archive."""
_NOTE_LIMIT = 64 << 20
_EXTENSION_LIMIT = 64 << 10
"""The largest block of extended attributes before a member; tarfile reads it into memory."""
_SPARE_BYTES = 16 << 20
_FIELDS = {
    "run": TEXT,
    "to": TEXT,
    "step": whole(0),
    "files": map_of(TEXT),
    "options": OBJECT | NOTHING,
    "measured": OBJECT | NOTHING,
}
_SOURCE = {"file": TEXT, "name": TEXT, "weight": real(0) | NOTHING}
_MEASURED = {
    "step": whole(0),
    "first_step": whole(0),
    "num_steps": whole(0),
    "loss": real(),
    "num_supervised": whole(0),
    "backend": TEXT,
    "precision": TEXT,
    "quantization": TEXT | NOTHING,
}


def write_archive(path: Path, members: Mapping[str, Path], note: Mapping[str, Any]) -> int:
    """Write a tar file atomically, the note first, then each file under its name; return its size in bytes."""
    try:
        target = path.resolve()  # a link is kept
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(target) as staged, tarfile.open(staged, mode="x:", format=tarfile.PAX_FORMAT) as tar:
            files = {name: file_sha256(source) for name, source in members.items()}
            full_note = {**note, "files": files}
            raw = (json.dumps({**full_note, "sha256": _hash_of(full_note)}, indent=1) + "\n").encode()
            _add(tar, NOTE, io.BytesIO(raw), len(raw))
            for name, source in members.items():
                with source.open("rb") as content:
                    _add(tar, name, content, os.fstat(content.fileno()).st_size)
    except OSError as error:
        raise UserError(
            f"The archive {path} could not be written.",
            why=f"{error.strerror or error}.",
            do=room_advice(disk_full_reason(error), "choose a different --out"),
        ) from error
    return path.stat().st_size


def read_note(path: Path) -> dict[str, Any]:
    """Return the note of an archive, its first member."""
    with _opened(path) as tar:
        return _read_note(path, tar)


def read_unpacked_note(folder: Path) -> dict[str, Any]:
    """Return the note in the folder of an unpacked run; empty for a run that was not moved."""
    note = read_json(folder / NOTE)
    if note and (wrong := _wrong_note(note)) is not None:
        raise UnreadableFile(folder / NOTE, wrong, do="unpack the archive again")
    return note


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive to `folder`, which appears only after all files are checked."""
    with _opened(path) as tar:
        files = _read_note(path, tar)["files"]
        members = _checked(path, tar, {NOTE, *files})
        need, free = sum(member.size for member in members), free_space(folder.parent)
        if need > path.stat().st_size:
            raise _not_intact(path, f"its members have {need:,} bytes, more than the file")
        if need + _SPARE_BYTES > free:
            raise UserError(
                f"There is not enough disk space to unpack {path}.",
                why=f"it needs {readable_bytes(need)} and {readable_bytes(free)} are free.",
                do="free some space, or choose a different --output_dir",
            )
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with staging_folder(folder) as staged:
                for member in members:
                    target = staged / member.name
                    _extract(tar, member, target)
                    if member.name != NOTE and file_sha256(target) != files[member.name]:
                        raise _not_intact(path, f"{member.name} has changed since it was written")
                put_new(staged, folder)
        except OSError as error:
            raise UserError(
                f"The archive {path} could not be unpacked to {folder}.",
                why=f"{error.strerror or error}; it needs {readable_bytes(need)}. No files were left there.",
                do="choose a different --output_dir or --name",
            ) from error


def _read_note(path: Path, tar: tarfile.TarFile) -> dict[str, Any]:
    first = tar.next()
    if first is None or first.name != NOTE or not _is_regular(first) or first.size > _NOTE_LIMIT:
        raise _not_intact(path, f"its first member is not {NOTE}")
    content = tar.extractfile(first)
    assert content is not None
    note = parse_json(content.read())
    wrong = _wrong_note(note) if isinstance(note, dict) else "it is not a JSON object"
    if wrong is not None:
        raise _not_intact(path, f"{NOTE}: {wrong}")
    if note.get("sha256") != _hash_of({key: value for key, value in note.items() if key != "sha256"}):
        raise _not_intact(path, f"{NOTE} has changed since it was written")
    return dict(note)


def _wrong_note(note: Mapping[str, Any]) -> str | None:
    """Describe the first wrong field of a note; None if all are valid."""
    wrong = wrong_field(note, _FIELDS, required=("run", "to", "step", "files"))
    if wrong is None and note.get("measured"):
        wrong = wrong_field(note["measured"], _MEASURED, required=tuple(_MEASURED), place="measured.")
    if wrong is not None:
        return wrong
    if not is_file_name(note["run"]):
        return f"run is {shown(note['run'])}, which is not a folder name"
    for option, place in (note.get("options") or {}).items():
        several = option in DATA_OPTIONS and isinstance(place, list) and bool(place)
        places = place if several else [{"file": place}]
        if option not in PACKED_OPTIONS or not all(map(_is_source, places)):
            return f"it gives the option {shown(option)} the file {shown(place)}"
    return None


def _is_source(entry: Any) -> bool:
    """Return True if an entry of a note refers to a file in the archive or a data source elsewhere."""
    if not isinstance(entry, dict) or wrong_field(entry, _SOURCE) is not None:
        return False
    file = entry.get("file")
    return "name" in entry if file is None else file.startswith("data/") and _is_plain(file)


def _checked(path: Path, tar: tarfile.TarFile, listed: Set[str]) -> list[tarfile.TarInfo]:
    """Return the members; raise a UserError unless they are the listed files, regular and with plain relative names."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        if not _is_regular(member) or not _is_plain(member.name) or member.name in found:
            raise _not_intact(path, f"{shown(member.name)} is not a plain file of a run")
        if member.name not in listed:
            raise _not_intact(path, f"{NOTE} does not list {shown(member.name)}")
        found[member.name] = member
    if missing := sorted(listed - found.keys()):
        raise _not_intact(path, f"{shown(missing[0])} is missing")
    folders = {str(parent) for name in found for parent in PurePosixPath(name).parents}
    if both := sorted(folders & found.keys()):
        raise _not_intact(path, f"{shown(both[0])} is both a file and a folder")
    return list(found.values())


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, member.name
    with target.open("xb") as file:
        shutil.copyfileobj(content, file)
    target.chmod(0o600)


def _is_regular(member: tarfile.TarInfo) -> bool:
    return member.type in tarfile.REGULAR_TYPES and not member.issparse() and member.size >= 0


def _is_plain(name: str) -> bool:
    """Return True for a normalized relative path that every system can store."""
    return len(name) <= 1000 and all(is_file_name(part) for part in name.split("/"))


def _add(tar: tarfile.TarFile, name: str, content: Any, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    tar.addfile(member, content)


def _hash_of(note: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


class _Member(tarfile.TarInfo):
    """A member whose extended attributes are small, since tarfile reads them into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        member = super().frombuf(buf, encoding, errors)
        if member.type not in tarfile.REGULAR_TYPES and member.size > _EXTENSION_LIMIT:
            raise tarfile.ReadError(f"a member of type {member.type!r} has {member.size:,} bytes")
        return member


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive; convert the errors of tarfile and of parsing to a UserError."""
    with open_plain(path) as file:
        try:
            # Opening already reads the first header.
            with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
                yield tar
        except (tarfile.TarError, EOFError, ValueError) as error:
            raise _not_intact(path, str(error)) from error


def _not_intact(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not an intact archive of a run.",
        why=f"{why}.",
        do="copy it again from its source, or make one: crosstune move RUN --to BACKEND",
    )
