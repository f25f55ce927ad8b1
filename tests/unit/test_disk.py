"""One folder in the place of another, with nothing missing in between."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from crosstune.core import disk


def make(folder: Path, word: str) -> Path:
    folder.mkdir()
    (folder / "word").write_text(word)
    return folder


@pytest.mark.parametrize("can_swap", [True, False])
def test_the_new_folder_is_in_place_and_the_old_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    if not can_swap:
        monkeypatch.setattr(disk, "_swap", lambda one, other: False)
    for word in ("first", "second"):
        new = make(tmp_path / f"new-{word}", word)
        disk.put_in_place(new, tmp_path / "result", aside=tmp_path / f"before-{word}")
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
    if not disk._swap(target, new) or not disk._swap(target, new):
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
        disk.put_in_place(new, target, aside=tmp_path / "aside")
    assert (target / "word").read_text() == "new"


def test_what_else_goes_wrong_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        disk.put_in_place(tmp_path / "nothing", make(tmp_path / "result", "old"), aside=tmp_path / "aside")
    assert (tmp_path / "result" / "word").read_text() == "old"
