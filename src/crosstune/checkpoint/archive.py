"""Pack a run into a tar file; unpack one after checking all names and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from crosstune.core.atomic_files import put_new, staged_file, staging_folder
from crosstune.core.disk import file_sha256, free_space, readable_bytes
from crosstune.core.errors import UserError

SUFFIX = ".crosstune.tar"
NOTE = "move.json"
_MEMBER_LIMIT = 100_000


def write_archive(path: Path, members: Mapping[str, Path], note: Mapping[str, Any]) -> int:
    """Write a tar file atomically, the note first, then each file under its name; return its size in bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged_file(path) as staged, tarfile.open(staged, mode="x:", format=tarfile.PAX_FORMAT) as tar:
            files = {name: file_sha256(source) for name, source in members.items()}
            full_note = {**note, "files": files}
            raw = (json.dumps({**full_note, "sha256": _hash_of(full_note)}, indent=1) + "\n").encode()
            _add(tar, NOTE, io.BytesIO(raw), len(raw))
            for name, source in members.items():
                with source.open("rb") as content:
                    _add(tar, name, content, os.fstat(content.fileno()).st_size)
    except OSError as error:
        raise UserError(f"The archive {path} could not be written.", why=str(error)) from error
    return path.stat().st_size


def read_note(path: Path) -> dict[str, Any]:
    """Return the note of an archive, which is its first member."""
    with _opened(path) as tar, _readable(path):
        first = tar.next()
        content = tar.extractfile(first) if first is not None and first.isfile() else None
        if first is None or first.name != NOTE or first.size > 2**20 or content is None:
            raise _not_ours(path, f"its first member is not {NOTE}")
        try:
            note = json.loads(content.read())
        except ValueError as error:
            raise _not_ours(path, f"{NOTE} is not JSON: {error}") from error
    if not isinstance(note, dict) or not isinstance(note.get("files"), dict):
        raise _not_ours(path, f"{NOTE} does not list the files of the archive")
    if note.get("sha256") != _hash_of({key: value for key, value in note.items() if key != "sha256"}):
        raise _damaged(path, f"{NOTE} has changed since it was written")
    return note


def unpack_archive(path: Path, folder: Path) -> None:
    """Unpack an archive to `folder`, which appears only when all files are checked; write nowhere else."""
    files = read_note(path)["files"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path) as tar, _readable(path):
        members = _checked(path, tar)
        found = {member.name for member in members} - {NOTE}
        if found != files.keys():
            missing = sorted(files.keys() - found)
            raise _damaged(
                path, f"it lacks {missing[0]}" if missing else f"it holds files that {NOTE} does not list"
            )
        need = sum(member.size for member in members)
        if need > (free := free_space(folder.parent)):
            raise UserError(
                f"There is not enough disk space to unpack {path}.",
                why=f"it takes {readable_bytes(need)} and {readable_bytes(free)} are free.",
            )
        with staging_folder(folder) as staged:
            for member in members:
                target = staged / member.name
                _extract(tar, member, target)
                if member.name != NOTE and file_sha256(target) != files[member.name]:
                    raise _damaged(path, f"{member.name} has changed since it was written")
            put_new(staged, folder)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, member.name
    with target.open("xb") as file:
        shutil.copyfileobj(content, file)
    target.chmod(0o600)


def _checked(path: Path, tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Return the members; raise a UserError unless all are regular files with unique, plain relative names."""
    found: dict[str, tarfile.TarInfo] = {}
    for member in tar:
        name = PurePosixPath(member.name)
        plain = not name.is_absolute() and ".." not in name.parts and "\\" not in member.name
        if not plain or not member.isfile() or member.name in found or "\0" in member.name:
            raise _not_ours(path, f"it holds {member.name!r}, which is not a plain file of a run")
        found[member.name] = member
        if len(found) > _MEMBER_LIMIT:
            raise _not_ours(path, f"it holds more than {_MEMBER_LIMIT:,} files")
    return list(found.values())


def _add(tar: tarfile.TarFile, name: str, content: Any, size: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o600
    tar.addfile(member, content)


def _hash_of(note: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(note, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError) as error:
        raise _damaged(path, str(error)) from error


def _opened(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path, mode="r:")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise _not_ours(path, str(error)) from error


def _damaged(path: Path, why: str) -> UserError:
    return UserError(
        f"The archive {path} is damaged, and nothing was unpacked.",
        why=f"{why}.",
        do="copy it again from its source",
    )


def _not_ours(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} is not an archive of a run.", why=why, do="make one: crosstune move RUN --to BACKEND"
    )
