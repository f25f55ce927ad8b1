"""The identity of a model: every byte of its weights, and the fields of config.json that change its numbers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from crosstune.core.errors import UserError
from crosstune.models import file_hashes
from crosstune.models.file_hashes import check_checksums, sha256_of, write_checksums
from crosstune.models.identity import config_identity, identity
from crosstune.models.tiny import tiny_model


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    return tiny_model(
        tmp_path / "model", hidden=16, intermediate=16, num_layers=1, num_heads=1, num_kv_heads=1
    )


def flip(path: Path, place: int) -> None:
    """Flip a byte and set the modification time back, as a tool that wants to hide it would."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0xFF]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_flipped_byte_anywhere_in_the_weights_is_seen(model: Path) -> None:
    path = model / "model.safetensors"
    known = identity(model)["weights_sha256"]
    size = path.stat().st_size
    for place in (size - 1, size // 2, size // 3 + 7, size - 4097):
        flip(path, place)
        assert identity(model)["weights_sha256"] != known
        flip(path, place)
        assert identity(model)["weights_sha256"] == known


def test_a_hash_is_made_once_and_again_when_the_file_changes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "_SETTLED_S", -1.0)
    path, read = model / "model.safetensors", list[int]()
    first = sha256_of(path, on_bytes=read.append)
    assert sum(read) == path.stat().st_size
    monkeypatch.setattr(file_hashes, "_known", {})  # another process
    read.clear()
    assert sha256_of(path, on_bytes=read.append) == first and read == []
    flip(path, 5000)
    assert sha256_of(path, on_bytes=read.append) != first and read


def test_a_file_that_has_just_changed_is_not_trusted(model: Path) -> None:
    path, read = model / "model.safetensors", list[int]()
    path.touch()
    sha256_of(path)
    sha256_of(path, on_bytes=read.append)
    assert read, "it may change again within the same tick of the clock"


def test_a_damaged_cache_is_made_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "_SETTLED_S", -1.0)
    first = sha256_of(model / "model.safetensors")
    (entry,) = (tmp_path / "cache" / "hashes").iterdir()
    for text in ("", "[]", "{", '{"stamp": 1, "sha256": 2}'):
        entry.write_text(text)
        monkeypatch.setattr(file_hashes, "_known", {})
        assert sha256_of(model / "model.safetensors") == first


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no owners and modes of this kind")
@pytest.mark.parametrize("how", ["of another file", "others may write", "of another user"])
def test_an_entry_of_the_cache_that_this_user_did_not_write_so_is_not_believed(
    how: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hashes, "_SETTLED_S", -1.0)
    path, read = model / "model.safetensors", list[int]()
    before = os.umask(0)
    try:
        first = sha256_of(path)
    finally:
        os.umask(before)
    (entry,) = (tmp_path / "cache" / "hashes").iterdir()
    assert entry.stat().st_mode & 0o777 == 0o600, "whatever the umask is"
    written = json.loads(entry.read_text())
    if how == "of another file":
        entry.write_text(json.dumps(written | {"path": "/another", "sha256": "0" * 64}))
    elif how == "others may write":
        entry.chmod(0o620)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: entry.stat().st_uid + 1)
    monkeypatch.setattr(file_hashes, "_known", {})
    assert sha256_of(path, on_bytes=read.append) == first
    assert read, "it was hashed again"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"rms_norm_eps": 1e-3}, False),
        ({"rope_parameters": {"rope_theta": 5.0}}, False),
        ({"hidden_act": "gelu"}, False),
        ({"transformers_version": "99.0", "torch_dtype": "float16", "use_cache": False}, True),
        ({"_name_or_path": "elsewhere", "eos_token_id": 7}, True),
    ],
)
def test_the_configuration_counts_where_it_changes_numbers(
    model: Path, change: dict[str, Any], same: bool
) -> None:
    config = json.loads((model / "config.json").read_text())
    assert (config_identity(config) == config_identity(config | change)) is same


def test_checksums_find_what_was_changed_and_say_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    (folder / "mlx").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "mlx" / "a b.json").write_text("{}")
    check_checksums(folder)  # a folder of another tool
    write_checksums(folder)
    (folder / ".DS_Store").write_text("added later")
    check_checksums(folder)
    flip(folder / "weights.bin", 5000)
    with pytest.raises(UserError, match=r"weights\.bin has changed(.|\n)*SHA256SUMS"):
        check_checksums(folder)
    flip(folder / "weights.bin", 5000)
    (folder / "mlx" / "a b.json").unlink()
    with pytest.raises(UserError, match=r"a b\.json is missing"):
        check_checksums(folder)


@pytest.mark.parametrize("line", ["", "x", f"{'0' * 64}  ../out", f"{'0' * 64}  /etc/passwd", "\udcff"])
def test_hostile_checksums_are_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "SHA256SUMS").write_bytes(line.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(UserError, match="SHA256SUMS"):
        check_checksums(tmp_path)
