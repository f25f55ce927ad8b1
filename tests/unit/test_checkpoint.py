"""Checkpoints on disk: read back, rejected if foreign or damaged, kept by rotation if needed."""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifests import make_manifest

from crosstune.checkpoint.folders import checkpoint_folders
from crosstune.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_LIMIT,
    SEAL,
    WEIGHTS,
    DamagedCheckpoint,
    Manifest,
    UnknownVersion,
    seal,
)
from crosstune.checkpoint.read import newest_valid, open_checkpoint
from crosstune.checkpoint.rotate import Keep, rotate, superfluous
from crosstune.checkpoint.tensors import describe_tensors, describe_trainable, read_tensors, write_tensors
from crosstune.checkpoint.write import SaveFailed, write_checkpoint
from crosstune.core.errors import UserError
from crosstune.core.protocols import SessionState
from crosstune.files.atomic_files import leftovers, set_aside
from crosstune.files.safetensors_header import BadSafetensors


def make_state(seed: int = 0) -> SessionState:
    random = np.random.default_rng(seed)
    weights = {
        "a.weight": random.standard_normal((3, 5), dtype=np.float32),
        "b.weight": np.zeros((0, 4), "<f4"),
    }
    return SessionState(
        weights=weights,
        moments={
            "first_moment": {name: array * 2 for name, array in weights.items()},
            "step": {name: np.asarray(7.0, "<f4") for name in weights},
        },
        random={"torch.cpu": random.integers(0, 256, 11, dtype=np.uint8)},
        facts={"loss_scale": {"factor": 1.0, "good_steps": 3}},
    )


def manifest_of(step: int, state: SessionState) -> Manifest:
    return make_manifest(step, trainable=describe_trainable(state), facts=dict(state.facts))


def save(root: Path, *steps: int) -> Path:
    """The folder of the last of them."""
    for step in steps:
        state = make_state(step)
        folder = write_checkpoint(root, state, manifest_of(step, state)).folder
    return folder


def edit(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest and make its seal anew, as a stranger can."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    rewrite(folder, json.dumps(manifest).encode())


def rewrite(folder: Path, raw: bytes) -> None:
    (folder / MANIFEST).write_bytes(raw)
    (folder / SEAL).write_bytes(seal(raw))


def damage(folder: Path) -> None:
    path = folder / WEIGHTS
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def steps_in(root: Path) -> list[int]:
    return [step for step, _ in checkpoint_folders(root)]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    state = make_state()
    found = open_checkpoint(save(tmp_path, 0)).load()
    for name, array in state.weights.items():
        np.testing.assert_array_equal(found.weights[name], array)
        np.testing.assert_array_equal(
            found.moments["first_moment"][name], state.moments["first_moment"][name]
        )
        assert found.moments["step"][name].shape == ()
    np.testing.assert_array_equal(found.random["torch.cpu"], state.random["torch.cpu"])
    assert found.facts == state.facts


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<i8", "u1", "?"])
def test_every_type_keeps_its_bits(tmp_path: Path, dtype: str) -> None:
    values = np.arange(24).astype(dtype).reshape(2, 3, 4)
    arrays = {"x": values, "scalar": values[0, 0, 1], "odd": np.arange(3, dtype=np.uint8)}
    write_tensors(tmp_path / "x.safetensors", arrays)
    found = read_tensors(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_the_files_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = save(tmp_path, 3)
    np.testing.assert_array_equal(load_file(folder / WEIGHTS)["a.weight"], make_state(3).weights["a.weight"])


def test_only_its_owner_may_look_into_it(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoints", 1)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent, *folder.iterdir())}
    assert {path.name: oct(mode) for path, mode in modes.items()} == {
        path.name: "0o700" if path.is_dir() else "0o600" for path in modes
    }


def test_latest_points_at_the_newest(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2)
    assert (tmp_path / "latest").readlink() == Path(folder.name)
    assert open_checkpoint(tmp_path / "latest").step == 2


@pytest.mark.parametrize(
    ("keep", "evaluations", "kept"),
    [
        (Keep(last_n=2), {}, [5, 6]),
        (Keep(last_n=9), {}, [1, 2, 3, 4, 5, 6]),
        (Keep(last_n=1), {2: 0.5, 3: 0.4, 5: 0.4}, [3, 6]),
        (Keep(last_n=1), {2: 0.5, 99: 0.1}, [2, 6]),
        (Keep(last_n=1), {1: math.nan, 2: 0.5}, [2, 6]),
        (Keep(last_n=1, best=False), {2: 0.5}, [6]),
        (Keep(last_n=1, every=2), {}, [2, 4, 6]),
        (Keep(last_n=2, every=3), {1: 0.1}, [1, 3, 5, 6]),
    ],
)
def test_what_rotation_keeps(
    tmp_path: Path, keep: Keep, evaluations: dict[int, float], kept: list[int]
) -> None:
    steps = [1, 2, 3, 4, 5, 6]
    assert sorted(set(steps) - set(superfluous(steps, keep, evaluations))) == kept
    save(tmp_path, *steps)
    rotate(tmp_path, keep, evaluations)
    assert sorted(steps_in(tmp_path)) == kept
    assert leftovers(tmp_path, of=bool) == []


def test_nothing_is_removed_while_the_newest_is_damaged(tmp_path: Path) -> None:
    damage(save(tmp_path, 1, 2, 3))
    with pytest.raises(UserError, match="No checkpoint is removed"):
        rotate(tmp_path, Keep(last_n=1), {})
    assert steps_in(tmp_path) == [3, 2, 1]


def test_a_checkpoint_that_is_set_aside_is_kept_and_not_taken(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, 2)
    assert set_aside(folder).name == "step-00000002~1"
    assert set_aside(save(tmp_path, 2)).name == "step-00000002~2"
    found = newest_valid(tmp_path)
    assert found is not None
    assert found.step == 1
    assert open_checkpoint(tmp_path / "step-00000002~1").step == 2


def test_a_folder_that_is_there_already_is_not_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(SaveFailed):
        save(tmp_path, 1)
    assert (folder / MANIFEST).read_bytes() == before
    assert leftovers(tmp_path, of=bool) == []


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    state = make_state()
    state.weights["a.weight"][0, 0] = np.nan  # type: ignore[index]
    with pytest.raises(SaveFailed, match="non-finite"):
        write_checkpoint(tmp_path, state, manifest_of(1, state))
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("version", [2, "1", True])
def test_an_unknown_version_fails_closed(tmp_path: Path, version: Any) -> None:
    folder = save(tmp_path, 1, 2)
    edit(folder, lambda manifest: manifest.update(format_version=version))
    with pytest.raises(UnknownVersion):
        open_checkpoint(folder)
    with pytest.raises(
        UnknownVersion
    ):  # an older one is not taken in its place: that would lose steps silently
        newest_valid(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", "a\x00b", "x" * 200, "manifest.json"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, 1)
    edit(folder, lambda manifest: manifest["files"].update({name: manifest["files"][WEIGHTS]}))
    with pytest.raises(DamagedCheckpoint, match="plain file name"):
        open_checkpoint(folder)


def link_weights(folder: Path) -> None:
    target = folder.parent / "elsewhere"
    (folder / WEIGHTS).rename(target)
    (folder / WEIGHTS).symlink_to(target)


def pipe_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def grow(name: str, num_bytes: int) -> Callable[[Path], None]:
    """A file that claims to be large and takes no room."""

    def act(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate(num_bytes)

    return act


def lengthen_header(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + raw[8:])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (link_weights, "not a regular file"),
        (pipe_weights, "not a regular file"),
        (grow(MANIFEST, MANIFEST_LIMIT + 1), "the limit for such a file"),
        (grow(SEAL, 2**30), "the limit for such a file"),
        (grow(WEIGHTS, 2**40), "bytes, not"),
        (lambda folder: (folder / WEIGHTS).unlink(), "missing"),
        (lambda folder: (folder / SEAL).unlink(), "missing"),
        (lengthen_header, "have changed"),
    ],
)
def test_what_does_not_belong_is_refused_before_memory_is_taken(
    tmp_path: Path, act: Callable[[Path], None], words: str
) -> None:
    folder = save(tmp_path, 1)
    act(folder)
    tracemalloc.start()
    with pytest.raises(DamagedCheckpoint, match=words):
        open_checkpoint(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23  # a chunk for hashing, however large the file says it is


def entry(*, shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        (b'{"a":' * 50_000, 0),
        (json.dumps({"a": entry(shape=[2**40], offsets=[0, 2**42])}).encode(), 8),
        (json.dumps({"a": entry(shape=[2], offsets=[0, 8], dtype="O")}).encode(), 8),
        (json.dumps({"a": entry(shape=[2], offsets=[0, 4], dtype="BF16")}).encode(), 4),
        (json.dumps({n: entry(shape=[2], offsets=[0, 8]) for n in "ab"}).encode(), 8),
    ],
)
def test_a_header_that_we_would_not_write_is_refused(tmp_path: Path, header: bytes, data_bytes: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data_bytes))
    for read in (read_tensors, describe_tensors):
        with pytest.raises(BadSafetensors):
            read(path)


def test_a_key_said_twice_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    rewrite(folder, (folder / MANIFEST).read_bytes().replace(b"{", b'{"step": 9,', 1))
    with pytest.raises(DamagedCheckpoint, match="occurs twice"):
        open_checkpoint(folder)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    folder.rename(tmp_path / "step-00000009")
    with pytest.raises(DamagedCheckpoint, match="different steps"):
        open_checkpoint(tmp_path / "step-00000009")
    (tmp_path / "step-00000009").rename(tmp_path / "the good one")  # which a person may do
    assert open_checkpoint(tmp_path / "the good one").step == 1


def test_damaged_ones_are_passed_over_and_named(tmp_path: Path) -> None:
    for step in (3, 2):
        save(tmp_path, step)
        damage(tmp_path / f"step-{step:08d}")
    save(tmp_path, 1)
    passed: list[DamagedCheckpoint] = []
    found = newest_valid(tmp_path, on_damaged=passed.append)
    assert found is not None
    assert found.step == 1
    assert [str(error).count("step-0000000") for error in passed] == [1, 1]
    assert "contents of weights.safetensors have changed" in passed[0].why


def test_files_that_the_system_adds_are_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / ".DS_Store").write_bytes(b"Bud1")
    (folder / "more").mkdir()
    assert open_checkpoint(folder).step == 1


def test_a_manifest_of_the_first_form_is_read_and_written_again() -> None:
    """The fields as crosstune has always written them, with and without the optional ones."""
    from crosstune.checkpoint.manifest import decode, encode

    first = {
        "format": "crosstune-checkpoint",
        "format_version": 1,
        "step": 3,
        "created": "2025-01-02T03:04:05+00:00",
        "engine": "torch",
        "backend": "cuda",
        "precision": "bf16",
        "quantization": "fp8-8bit",
        "outside_fp8": ["layers.0.qkv"],
        "method": "lora",
        "recipe": "sft",
        "identity": {
            "model": {"name": "tiny", "identity": "a" * 64, "config": "b" * 64},
            "data": "c" * 64,
            "eval_data": None,
            "order": {"seed": 42, "rows_per_step": 8},
            "quantization": {"quantizer": "fp8", "bits": 8, "group_size": 64, "kept": ["a.up"]},
            "trainable": {"method": "lora", "lora_rank": 8},
            "optimizer": "adamw",
        },
        "schedule": {"name": "cosine", "step": 3, "num_steps": 10, "next_lr": 1e-4},
        "data": {"epoch": 0, "row_in_epoch": 24, "rows_done": 24},
        "progress": {"steps": 3, "tokens": 90, "evaluations": {"2": 1.5}, "wall_s": 2.5},
        "asked": {"lr": 0.0002},
        "options": {"lr": 0.0002, "batch_size": 8, "world_size": 1},
        "versions": {"torch": "2.9.0"},
        "resumed_from": None,
        "trainable": {"a.lora_A": {"dtype": "F32", "shape": [8, 4]}},
        "facts": {"loss_scale": {"factor": 1.0, "good_steps": 0}},
        "files": {"weights.safetensors": {"bytes": 1, "sha256": "d" * 64}},
    }
    raw = json.dumps(first).encode()
    found = decode(raw, seal_found=seal(raw), folder="x")
    assert json.loads(encode(found)) == first
    assert found.base_choice is not None and found.base_choice.outside_fp8 == ("layers.0.qkv",)
    optional = ("created", "outside_fp8", "method", "recipe", "asked", "options", "versions", "resumed_from")
    older = {name: value for name, value in first.items() if name not in optional} | {
        "options": None,
        "metadata": {"by": "me"},
    }
    raw = json.dumps(older).encode()
    found = decode(raw, seal_found=seal(raw), folder="x")
    assert (found.step, found.method, found.options, found.asked) == (3, None, {}, {})
    assert json.loads(encode(found))["metadata"] == {"by": "me"}
