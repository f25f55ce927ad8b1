"""Archives of runs: their contents are checked before anything is written, and a rejected archive leaves nothing behind."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

from crosstune.checkpoint.archive import NOTE, read_note, unpack_archive, write_archive
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.files.run_lock import InUse
from crosstune.runs.move import pack_files
from crosstune.runs.resume import unpack_run

NOTE_FIELDS = {
    "version": 1,
    "run": "r",
    "step": 2,
    "to": "cpu",
    "options": {"dataset": "data/d.jsonl"},
    "measured": None,
}


def make(
    path: Path, members: dict[str, bytes], *, note: dict[str, Any] | None = None, sparse: bool = False
) -> Path:
    """Write an archive as an attacker would: every hash fits."""
    full = {
        **NOTE_FIELDS,
        "files": {name: hashlib.sha256(raw).hexdigest() for name, raw in members.items()},
    } | (note or {})
    full["sha256"] = hashlib.sha256(json.dumps(full, sort_keys=True).encode()).hexdigest()
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT if sparse else tarfile.PAX_FORMAT) as tar:
        for name, raw in {NOTE: json.dumps(full).encode(), **members}.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return path


def test_there_and_back(tmp_path: Path) -> None:
    (tmp_path / "plan").write_text("{}")
    write_archive(tmp_path / "a.tar", {"plan.json": tmp_path / "plan"}, NOTE_FIELDS)
    assert read_note(tmp_path / "a.tar")["run"] == "r"
    unpack_archive(tmp_path / "a.tar", tmp_path / "new" / "runs" / "r")
    assert (tmp_path / "new" / "runs" / "r" / "plan.json").read_text() == "{}"


@pytest.mark.parametrize(
    "members",
    [{"../x": b""}, {"/x": b""}, {"a/../x": b""}, {"a\\x": b""}, {"n" * 300: b""}, {"x/y": b"", "x": b""}],
)
def test_names_that_are_not_those_of_a_run(tmp_path: Path, members: dict[str, bytes]) -> None:
    path = make(tmp_path / "a.tar", members)
    with pytest.raises(UserError, match=r"a\.tar is not an intact archive"):
        unpack_archive(path, tmp_path / "runs" / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize(
    "note",
    [
        {"run": ".."},
        {"files": {"x": 5}},
        {"options": {"dataset": "/etc/passwd"}},
        {"options": {"dataset": "data/../../x"}},
        {"options": {"hub_token": "data/x"}},
        {"options": {"dataset": [{"file": "/etc/passwd"}]}},
        {"measured": {"step": 2}},
        {"deep": json.loads("[" * 100 + "]" * 100)},
    ],
)
def test_notes_with_wrong_types(tmp_path: Path, note: dict[str, Any]) -> None:
    path = make(tmp_path / "a.tar", {"plan.json": b"{}"}, note=note)
    with pytest.raises(UserError, match=r"a\.tar is not an intact archive"):
        read_note(path)
    with pytest.raises(UserError):
        unpack_archive(path, tmp_path / "runs" / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_are_refused(tmp_path: Path, kind: bytes) -> None:
    path = make(tmp_path / "a.tar", {"plan.json": b"{}"})
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("other")
        member.type, member.linkname = kind, "plan.json"
        tar.addfile(member)
    with pytest.raises(UserError, match="not a plain file"):
        unpack_archive(path, tmp_path / "runs" / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"\x80\x04cos\nsystem\n" * 100)
    with pytest.raises(UserError, match="not an intact archive"):
        read_note(tmp_path / "x.tar")


def test_a_sparse_member_takes_no_space_in_the_archive_and_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", {"x": b"\0" * 512}, sparse=True)
    raw = bytearray(path.read_bytes())
    start = next(place for place in range(0, len(raw), 512) if raw[place : place + 2] == b"x\0")
    raw[start + 156 : start + 157] = b"S"
    raw[start + 483 : start + 495] = b"%011o\0" % (3 << 30)  # its size when it is unpacked
    raw[start + 148 : start + 156] = b" " * 8
    raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
    path.write_bytes(raw)
    with pytest.raises(UserError, match="not a plain file"):
        unpack_archive(path, tmp_path / "runs" / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_a_changed_member_leaves_nothing_behind(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tar", {"plan.json": b"{}", "x": b"text"})
    raw = path.read_bytes().replace(b"text", b"tent")
    path.write_bytes(raw)
    with pytest.raises(UserError, match="x has changed"):
        unpack_archive(path, tmp_path / "r")
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_large_extended_attributes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(NOTE)
        member.pax_headers = {"comment": "x" * (1 << 20)}
        tar.addfile(member)
    with pytest.raises(UserError, match=r"a\.tar is not an intact archive"):
        read_note(path)


def test_of_several_starts_of_one_archive_one_unpacks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = make(tmp_path / "a.tar", {"plan.json": b"{}"}, note={"options": {}})
    config = make_config(resume=str(archive), output_dir=str(tmp_path / "runs"), name="r")
    unpacking, others_done = threading.Event(), threading.Event()
    unpacked = list[Path]()

    def unpack(path: Path, folder: Path) -> None:
        unpacked.append(folder)
        unpacking.set()
        assert others_done.wait(600)
        unpack_archive(path, folder)

    monkeypatch.setattr("crosstune.runs.resume.unpack_archive", unpack)
    winner = threading.Thread(target=unpack_run, args=(config,))
    winner.start()
    assert unpacking.wait(600)
    for _ in range(2):
        with pytest.raises(InUse, match="r is in use"):
            unpack_run(config)
    others_done.set()
    winner.join()
    assert unpacked == [tmp_path / "runs" / "r"]
    assert unpack_run(config)[0] == tmp_path / "runs" / "r", "a later start continues what was unpacked"
    assert len(unpacked) == 1


def test_the_files_of_options_are_found_after_a_move(tmp_path: Path) -> None:
    tokenizer, template = tmp_path / "tokenizer", tmp_path / "chat.jinja"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "model.safetensors").write_text("not packed")
    template.write_text("{{ messages }}")
    files, packed_options = pack_files(
        make_config(tokenizer=str(tokenizer), chat_template=str(template)), with_data=True
    )
    note = {"run": "r", "to": "cpu", "step": 1, "options": packed_options}
    archive = tmp_path / "a.tar"
    write_archive(archive, {f"data/{name}": path for name, path in files.items()}, note)
    folder, options = unpack_run(make_config(resume=str(archive), output_dir=str(tmp_path / "runs")))
    assert [path.name for path in Path(options["tokenizer"]).iterdir()] == ["tokenizer.json"]
    assert Path(options["chat_template"]).read_text() == "{{ messages }}"
    assert options["backend"] == "cpu" and folder == tmp_path / "runs" / "r"
