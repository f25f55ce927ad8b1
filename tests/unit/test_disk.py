"""One folder in the place of another, with nothing missing in between."""

from __future__ import annotations

import threading
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


def test_nobody_ever_finds_the_place_empty(tmp_path: Path) -> None:
    target = make(tmp_path / "result", "old")
    if not disk._swap(target, make(tmp_path / "other", "other")):
        pytest.skip("this disk cannot swap two names")
    missing, done = 0, threading.Event()

    def watch() -> None:
        nonlocal missing
        while not done.is_set():
            missing += not target.exists()

    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(300):
        disk.put_in_place(make(tmp_path / "new", "new"), target, aside=tmp_path / f"aside-{number}")
    done.set()
    watcher.join()
    assert missing == 0


def test_what_else_goes_wrong_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        disk.put_in_place(tmp_path / "nothing", make(tmp_path / "result", "old"), aside=tmp_path / "aside")
    assert (tmp_path / "result" / "word").read_text() == "old"
