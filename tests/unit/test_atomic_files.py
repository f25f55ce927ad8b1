"""Files and folders appear complete or not at all, and leftovers of killed processes are found."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from crosstune.files import atomic_files


def make(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "word").write_text(word)
    return folder


@pytest.mark.parametrize("can_swap", [True, False])
def test_the_new_folder_is_in_place_and_the_old_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(atomic_files, "_swap", lambda one, other: False)
    for word in ("first", "second"):
        new = make(tmp_path / f"new-{word}", word)
        atomic_files.put_in_place(new, tmp_path / "result", aside=tmp_path / f"before-{word}")
        assert not new.exists()
        assert (tmp_path / "result" / "word").read_text() == word
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before-second", "result"]
    assert (tmp_path / "before-second" / "word").read_text() == "first"


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survived", [0, 1, 2])
def test_wherever_it_is_killed_one_of_the_two_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    target, new = make(tmp_path / "result", "old"), make(tmp_path / "new", "new")
    if not atomic_files._swap(target, new) or not atomic_files._swap(target, new):
        pytest.skip("this disk cannot swap two names")
    left = [survived]

    def dying(path: Path, to: Path) -> Path:
        if not left[0]:
            raise Killed
        left[0] -= 1
        os.rename(path, to)  # noqa: PTH104
        return to

    monkeypatch.setattr(Path, "rename", dying)
    with contextlib.suppress(Killed):
        atomic_files.put_in_place(new, target, aside=tmp_path / "aside")
    assert (target / "word").read_text() == "new"


def test_a_folder_that_holds_something_is_not_replaced_by_a_new_one(tmp_path: Path) -> None:
    target, new = make(tmp_path / "result", "old"), make(tmp_path / "new", "new")
    with pytest.raises(OSError, match="not empty"):
        atomic_files.put_new(new, target)
    assert (target / "word").read_text() == "old"
    (target / "word").unlink()
    atomic_files.put_new(new, target)
    assert (target / "word").read_text() == "new"


@pytest.mark.parametrize("put", ["put_new", "put_in_place"])
def test_every_file_is_on_the_disk_before_its_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    new, target = make(tmp_path / "new", "new"), tmp_path / "result"
    make(new / "inner", "deeper")
    (new / "word").chmod(0o400)
    (new / "link").symlink_to("nowhere")
    synced: list[tuple[int, bool]] = []
    plain = os.fsync

    def watched(handle: int) -> None:
        synced.append((os.fstat(handle).st_ino, target.exists()))
        plain(handle)

    monkeypatch.setattr(os, "fsync", watched)
    wanted = {path.stat().st_ino for path in (new, new / "word", new / "inner", new / "inner" / "word")}
    more = {"aside": tmp_path / "aside"} if put == "put_in_place" else {}
    getattr(atomic_files, put)(new, target, **more)
    assert {number for number, after in synced if not after} == wanted
    assert synced[-1] == (tmp_path.stat().st_ino, True)


@pytest.mark.parametrize("survived", range(5))
def test_a_file_is_the_old_or_the_new_one_wherever_writing_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survived: int
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    left = [survived]

    def dying(home: object, name: str) -> None:
        plain = getattr(home, name)

        def call(*args: object, **options: object) -> object:
            if not left[0]:
                raise Killed
            left[0] -= 1
            return plain(*args, **options)

        monkeypatch.setattr(home, name, call)

    for home, name in ((Path, "write_bytes"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
        dying(home, name)
    with contextlib.suppress(Killed):
        atomic_files.write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == ("new" if survived >= 3 else "old")
    assert atomic_files.clear_leftovers(tmp_path, of="b.json".__eq__) == 0
    atomic_files.clear_leftovers(tmp_path, of="a.json".__eq__)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="directory"):
        atomic_files.write_text(tmp_path / "a", "text")
    with pytest.raises(Killed), atomic_files.staging_folder(tmp_path / "b") as folder:
        (folder / "half").write_text("half")
        raise Killed
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


@pytest.mark.parametrize(
    "write",
    [lambda path: atomic_files.write_text(path, "x"), lambda path: atomic_files.replace_link(path, to="x")],
)
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for target in (tmp_path / "folder", tmp_path / "missing" / "a", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match="director") as raised:
            write(target)
        assert (raised.value.filename, raised.value.filename2) == (str(target), None)


def test_a_removed_folder_is_gone_from_its_name_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "old", "old")
    monkeypatch.setattr(atomic_files.shutil, "rmtree", lambda path: None)
    atomic_files.remove_folder(folder)
    assert not folder.exists()
    [left] = atomic_files.leftovers(tmp_path, of="old".__eq__)
    assert (left / "word").read_text() == "old"


def test_what_is_set_aside_gets_the_first_free_number(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        path = make(tmp_path / "step", f"the {number}.")
        assert atomic_files.set_aside(path) == tmp_path / f"step~{number}"
    assert [(tmp_path / f"step~{n}" / "word").read_text() for n in (1, 2, 3)] == [
        "the 1.",
        "the 2.",
        "the 3.",
    ]
    assert len(list(tmp_path.iterdir())) == 3


def test_an_error_in_a_staging_folder_names_the_target(tmp_path: Path) -> None:
    full = os.strerror(errno.ENOSPC)
    with pytest.raises(OSError) as found, atomic_files.staging_folder(tmp_path / "a") as folder:
        raise OSError(errno.ENOSPC, full, str(folder / "deep" / "file"))
    assert str(found.value) == str(OSError(errno.ENOSPC, full, str(tmp_path / "a" / "deep" / "file")))
    with pytest.raises(OSError) as found, atomic_files.staging_folder(tmp_path / "absent" / "a"):
        pass
    assert found.value.filename == str(tmp_path / "absent" / "a")
    with pytest.raises(OSError) as found, atomic_files.staging_folder(tmp_path / "a"):
        raise OSError(errno.EIO, "other", "/input")
    assert found.value.filename == "/input"
    assert list(tmp_path.iterdir()) == []


def test_a_staging_folder_is_private_and_may_be_moved_away(tmp_path: Path) -> None:
    with atomic_files.staging_folder(tmp_path / "a") as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        assert atomic_files.staged_name(folder) == "a"
        folder.rename(tmp_path / "a")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    for word in ("one", "two"):
        atomic_files.replace_link(tmp_path / "latest", to=word)
        assert str((tmp_path / "latest").readlink()) == word
    assert list(tmp_path.iterdir()) == [tmp_path / "latest"]


def test_leftovers_of_every_kind_are_cleared_and_nothing_else(tmp_path: Path) -> None:
    file, folder, link = (atomic_files.staging_path(tmp_path / name) for name in ("a", "b", "c"))
    file.write_text("half")
    make(folder, "half")
    link.symlink_to(make(tmp_path / "kept", "whole"))
    (tmp_path / ".a.0123").write_text("no name of ours")
    assert atomic_files.leftovers(tmp_path / "missing", of=bool) == []
    assert atomic_files.leftovers(tmp_path, of="b".__eq__) == [folder]
    assert atomic_files.clear_leftovers(tmp_path, of=bool) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.0123", "kept"]
    assert (tmp_path / "kept" / "word").read_text() == "whole"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES, None])
def test_where_names_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """A C library without the call, or a file system that refuses it; any other refusal is an error."""

    class Refuses:
        def renameat2(self, *arguments: object) -> int:
            ctypes.set_errno(code or 0)
            return -1

        renamex_np = renameat2

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object() if code is None else Refuses())
    new, target, aside = make(tmp_path / "new", "new"), make(tmp_path / "target", "old"), tmp_path / "aside"
    if code == errno.EACCES:
        with pytest.raises(PermissionError):
            atomic_files.put_in_place(new, target, aside=aside)
    else:
        atomic_files.put_in_place(new, target, aside=aside)
        assert [(path / "word").read_text() for path in (target, aside)] == ["new", "old"]
