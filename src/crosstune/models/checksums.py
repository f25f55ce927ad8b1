"""Write and check the hashes of a result's files, in a file that `sha256sum -c` reads too."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from crosstune.core.errors import UserError
from crosstune.core.plain_files import UnreadableFile, read_plain_text
from crosstune.models.file_hashes import sha256_of_all

SUMS = "SHA256SUMS"
_LINE = re.compile(r"(?P<sha>[0-9a-f]{64})  (?P<name>\S.*)")
_LIMIT_BYTES = 4 * 2**20


def write_checksums(folder: Path) -> None:
    """Write the hashes of all files in a folder of ours."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    hashes = sha256_of_all(paths)
    lines = [f"{hashes[path]}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_checksums(folder: Path) -> None:
    """Raise a UserError when a file of a result is missing or has other contents than when it was written.

    Folders of other tools have no hashes, and files that were added later are not checked.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    wanted = _read(sums)
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise _damaged(folder, f"{missing[0]} is missing")
    found = sha256_of_all([folder / name for name in wanted])
    changed = [name for name, sha in wanted.items() if found[folder / name] != sha]
    if changed:
        raise _damaged(folder, f"{changed[0]} has changed since it was written")


def _read(path: Path) -> dict[str, str]:
    try:
        lines = read_plain_text(path, limit=_LIMIT_BYTES).splitlines()
    except UnreadableFile as error:
        raise _damaged(path.parent, f"{SUMS} cannot be read: {error.why.rstrip('.')}") from error
    wanted = {}
    for number, line in enumerate(lines, start=1):
        found = _LINE.fullmatch(line)
        if found is None or not _is_inside(found["name"]):
            raise _damaged(path.parent, f"line {number} of {SUMS} is not a hash and a file name")
        wanted[found["name"]] = found["sha"]
    return wanted


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _damaged(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder} is damaged or was changed.",
        why=f"{why}.",
        do=f"restore it from a copy or write it again; if you changed it on purpose, remove {folder / SUMS}",
    )
