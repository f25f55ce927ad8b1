"""Outputs named by the user are checked before the work and never destroyed; a full disk or a kill loses no finished work."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from injection.disks import file_limit
from safetensors.numpy import save_file
from unprivileged import as_other_user, reachable_folder

from crosstune.checkpoint.write import failed
from crosstune.cli.adopt import adopt
from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.files.outputs import check_output, check_output_folder, is_stream, write_output
from crosstune.files.plain_files import disk_full_reason
from crosstune.files.run_record import RecordFailed

Captured = pytest.CaptureFixture[str]


# The commands with an output, each with inputs that do not exist: an error about the output shows that it is checked first.
FILES = {
    "judge predict": ["judge", "predict", "no-run", "--input", "no-input.jsonl", "--output"],
    "generate": ["generate", "no-model", "--prompt", "x", "--output"],
    "pairs make": ["pairs", "make", "no-model", "--prompts", "no-file", "--judge", "no-run", "--out"],
    "pairs check": ["pairs", "check", "no-pairs.jsonl", "--judge", "no-run", "--out"],
    "latents decode": ["latents", "decode", "no-run", "--text", "x", "--out"],
    "latents encode": ["latents", "encode", "no-run", "--text", "x", "--out"],
    "latents sample": ["latents", "sample", "no-run", "--out"],
    "compare": ["compare", "no-run", "other", "--out"],
    "launch": ["launch", "--on", "slurm", "--nnodes", "1", "--print", "--output"],
    "move": ["move", "no-run", "--to", "cpu", "--out"],
    "import": ["import", "no-file.yml", "--out"],
}
FOLDERS = {
    "judge data": ["judge", "data", "no-data.jsonl", "--split_to"],
    "judge eval": ["judge", "eval", "no-run", "--dataset", "no-data.jsonl", "--out"],
    "latents build": ["latents", "build", "grammar", "--out"],
    "merge": ["merge", "no-run", "--out"],
    "export": ["export", "no-run", "--to", "hf", "--out"],
    "convert": ["convert", "no-model", "--to", "bnb", "--out"],
    "checkpoint export": ["checkpoint", "export", "no-run", "--out"],
    "checkpoint import": ["checkpoint", "import", "no-file", "--out"],
    "push": ["push", "no-run", "--to", "org/name", "--dry_run", "--out"],
}


@pytest.mark.parametrize("command", FILES)
def test_a_file_is_checked_before_any_work(command: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("mine")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, why in (("", "a folder"), ("socket", "a socket"), ("file/out", "file")):
            assert main([*FILES[command], str(tmp_path / name)]) == 2
            said = capsys.readouterr().err
            assert str(tmp_path / name.split("/")[0]) in said and why in said and "do:" in said
        assert stat.S_ISSOCK((tmp_path / "socket").stat().st_mode)
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "socket"]


@pytest.mark.parametrize("command", FOLDERS)
def test_a_folder_is_checked_before_any_work(command: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "file").write_text("mine")
    for name in ("file", "file/out"):
        assert main([*FOLDERS[command], str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert (
            str(tmp_path / "file") in said and "do:" in said and "no-" not in re.sub(r".* \.\.\.\n", "", said)
        )
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("command", FILES)
def test_an_existing_file_is_kept(command: str, tmp_path: Path, capsys: Captured) -> None:
    mine = tmp_path / "mine"
    mine.write_text("<!doctype html>mine")
    (tmp_path / "link").symlink_to(mine)
    for name in ("mine", "link"):
        assert main([*FILES[command], str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"{tmp_path / name} already exists" in said and "do:" in said
    assert mine.read_text() == "<!doctype html>mine" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("command", FILES)
def test_a_file_of_a_run_is_kept_even_with_overwrite(command: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "run" / "adapter").mkdir(parents=True)
    (tmp_path / "run" / "plan.json").write_text('{"options": {}}')
    for name in ("config.yaml", "report.html", "adapter/adapter_model.safetensors"):
        file = tmp_path / "run" / name
        file.write_text('<meta name="generator" content="crosstune">')
        may_replace = [] if command in ("compare", "launch") else ["--overwrite"]
        assert main([*FILES[command], str(file), *may_replace]) == 2
        assert f"it belongs to the run {tmp_path / 'run'}" in capsys.readouterr().err
        assert "generator" in file.read_text()
    with pytest.raises(UserError, match="cannot be written"):
        check_output(tmp_path / "run" / "checkpoints" / "new", option="out")
    check_output(tmp_path / "run" / "answers.jsonl", option="out")
    assert main([*FOLDERS["checkpoint import"], str(tmp_path / "run")]) == 2
    assert "already contains a run" in capsys.readouterr().err


@pytest.mark.parametrize("command", FILES | FOLDERS)
def test_a_name_with_control_characters_is_rejected(command: str, tmp_path: Path, capsys: Captured) -> None:
    assert main([*(FILES | FOLDERS)[command], str(tmp_path / "a\nb")]) == 2
    assert "control characters" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["merge", "export", "convert", "checkpoint export", "push"])
def test_a_result_is_not_put_into_a_run_a_device_or_a_name_without_room(
    command: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "plan.json").write_text('{"options": {}}')
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    for out, why in (
        (tmp_path / "run" / "checkpoints" / "step-00000009", "it belongs to the run"),
        (tmp_path / "run" / "adapter", "it belongs to the run"),
        (tmp_path / "link" / "new", "it belongs to the run"),
        (Path(os.devnull), "it is a device"),
        (tmp_path / ("x" * 240), "File name too long"),
    ):
        assert main([*FOLDERS[command], str(out)]) == 2
        said = capsys.readouterr().err
        assert why in said and "do:  choose a different --out" in said and "remove" not in said
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("command", ["merge", "export", "convert", "checkpoint export"])
def test_a_root_or_a_broken_link_is_no_output_folder(command: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert main([*FOLDERS[command], str(tmp_path / "link")]) == 2
    assert "it is a broken link" in (said := capsys.readouterr().err) and "do:" in said
    with as_other_user():
        assert main([*FOLDERS[command], "/"]) == 2
    assert "/ is not empty" in (said := capsys.readouterr().err) and "do:" in said


def test_folders_without_a_name_can_be_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_output_folder(Path(), option="out")
    check_output_folder(Path(".."), option="out")
    with as_other_user(), pytest.raises(UserError, match="cannot be written"):
        check_output_folder(Path("/"), option="out")
    assert list(tmp_path.iterdir()) == []


def test_adopt_needs_a_project_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    with as_other_user(), pytest.raises(UserError, match="is the root of the file system"):
        adopt(Path("/tmp/.."), force=True)
    with pytest.raises(UserError, match="file is a file, not a folder"):
        adopt(tmp_path / "file")
    with pytest.raises(UserError, match="link is a broken link, not a folder"):
        adopt(tmp_path / "link")


def test_a_folder_without_rights_is_refused_by_its_own_name(tmp_path: Path) -> None:
    with reachable_folder() as folder:
        (folder / "closed").mkdir(mode=0o555)
        with as_other_user(), pytest.raises(UserError, match="Permission denied") as caught:
            check_output(folder / "closed" / "out.jsonl", option="output")
    assert str(folder / "closed" / "out.jsonl") in caught.value.message
    assert "closed/." not in str(caught.value)  # no hidden name


def test_the_input_is_not_replaced(tmp_path: Path, capsys: Captured) -> None:
    items = tmp_path / "items.jsonl"
    items.write_text('{"task": "t", "answer": "a", "mine": 1}\n')
    (tmp_path / "link.jsonl").symlink_to(items)
    for output in (items, tmp_path / "link.jsonl"):
        assert main(["judge", "predict", "no-run", "--input", str(items), "--output", str(output)]) == 2
        assert "is the input" in capsys.readouterr().err
        words = ["generate", "no-model", "--prompt_file", str(items), "--output", str(output), "--overwrite"]
        items_before = items.read_text()
        items.write_text('{"prompt": "p"}\n')
        assert main(words) == 2
        assert "is the input" in capsys.readouterr().err
        items.write_text(items_before)
    assert "mine" in items.read_text()
    config = tmp_path / "axolotl.yml"
    config.write_text("base_model: m\nadapter: lora\n")
    assert main(["import", str(config), "--out", str(config), "--overwrite"]) == 2
    assert "is the input" in capsys.readouterr().err and "adapter: lora" in config.read_text()


def test_a_regular_file_is_replaced_with_its_mode_and_through_its_link(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    target, link = tmp_path / "data" / "out", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_output(link, b"new")
    assert link.is_symlink() and target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    with file_limit(1), pytest.raises(UserError, match="cannot be written") as caught:
        write_output(link, b"newer")
    assert "File too large" in caught.value.why and str(link) in caught.value.message
    assert "ulimit -f" in caught.value.do and "free some space" not in caught.value.do
    assert target.read_text() == "new" and [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("make", [failed, lambda path, need, error: RecordFailed(path, error)])
@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.EFBIG, "ulimit -f"), (errno.ENOSPC, "free space"), (errno.EIO, "repair the disk")],
)
def test_a_run_that_cannot_be_written_says_what_helps(
    make: Callable[..., UserError], number: int, words: str, tmp_path: Path
) -> None:
    error = make(tmp_path / "file", 1 << 20, OSError(number, os.strerror(number)))
    assert words in error.do and "--resume auto" in error.do
    assert ("free space" in error.do) == (number != errno.EFBIG)


def test_pipes_and_devices_are_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    data = os.urandom(1 << 20)  # more than a pipe holds
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    check_output(pipe, option="out")
    write_output(pipe, data)
    reader.join()
    assert found == [data] and stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(UserError, match="cannot be written"):
        check_output(pipe, option="out", streams=False)
    full = Path("/dev/full")
    if full.exists():
        kind = full.stat().st_rdev
        check_output(full, option="out")
        with pytest.raises(UserError, match=r"/dev/full cannot be written(.|\n)*free some space"):
            write_output(full, data)
        assert stat.S_ISCHR(full.stat().st_mode) and full.stat().st_rdev == kind
    write_output(Path("/dev/null"), data)
    assert is_stream(Path("/dev/null"))


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="the system has no /dev/stdout")
def test_standard_output_is_written_in_place_even_if_it_is_a_file(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from crosstune.files.outputs import write_output\n"
        "print('before'); write_output(Path('/dev/stdout'), b'row\\n'); print('after')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\nrow\nafter\n"


@pytest.mark.parametrize("name", ["numpy", "safetensors", "torch", "mlx", "plain"])
def test_the_full_disk_of_every_library_is_recognized(name: str, tmp_path: Path) -> None:
    array = np.zeros(100_000, np.float32)
    with file_limit(4096), pytest.raises(Exception) as caught:
        if name == "numpy":
            np.save(tmp_path / "a.npy", array)
        elif name == "safetensors":
            save_file({"a": array}, tmp_path / "a.safetensors")
        elif name == "torch":
            torch = pytest.importorskip("torch")
            torch.save(torch.from_numpy(array), tmp_path / "a.pt")
        elif name == "mlx":
            mlx = pytest.importorskip("mlx.core")
            mlx.save_safetensors(str(tmp_path / "a.safetensors"), {"a": mlx.array(array)})
        else:
            (tmp_path / "a").write_bytes(array.tobytes())
    assert disk_full_reason(caught.value) is not None
    assert disk_full_reason(ValueError("the file is too large")) is None
