"""What a user names as output is checked before the work, is never destroyed, and a full disk or a kill costs nothing done."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from latent_sessions import grammar_pairs
from safetensors.numpy import load_file, save_file
from unprivileged import as_other_user, reachable_folder

from crosstune.cli.adopt import adopt
from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import leftovers, staging_path
from crosstune.files.journal import Journal
from crosstune.files.outputs import check_output, check_output_folder, is_stream, write_output
from crosstune.files.plain_files import no_room

Captured = pytest.CaptureFixture[str]


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Limit the size of every file, which ends a write as a full disk does and needs no rights."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
}
FOLDERS = {
    "judge data": ["judge", "data", "no-data.jsonl", "--split_to"],
    "latents build": ["latents", "build", "grammar", "--out"],
    "merge": ["merge", "no-run", "--out"],
    "export": ["export", "no-run", "--to", "hf", "--out"],
    "convert": ["convert", "no-model", "--to", "bnb", "--out"],
    "checkpoint export": ["checkpoint", "export", "no-run", "--out"],
    "checkpoint import": ["checkpoint", "import", "no-file", "--out"],
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
    assert "already holds a run" in capsys.readouterr().err


@pytest.mark.parametrize("command", FILES | FOLDERS)
def test_a_name_with_control_characters_is_rejected(command: str, tmp_path: Path, capsys: Captured) -> None:
    assert main([*(FILES | FOLDERS)[command], str(tmp_path / "a\nb")]) == 2
    assert "control characters" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


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


def test_an_archive_replaces_only_what_the_user_allows(
    adapter: Path, tmp_path: Path, capsys: Captured
) -> None:
    run, out = adapter.parent, tmp_path / "a.tar"
    (tmp_path / "link.tar").symlink_to(out)
    words = ["move", str(run), "--to", "cpu", "--out"]
    assert main([*words, str(tmp_path / "link.tar")]) == 0  # the link stays
    assert out.is_file() and (tmp_path / "link.tar").is_symlink()
    assert f"--resume {tmp_path / 'link.tar'} " in capsys.readouterr().out
    out.write_text("mine")
    assert main([*words, str(out)]) == 2 and out.read_text() == "mine"
    assert "pass --overwrite" in capsys.readouterr().err
    assert main([*words, str(out), "--overwrite"]) == 0 and out.read_bytes() != b"mine"
    default = run.with_name("run-step1-cpu.crosstune.tar")
    default.write_text("mine")
    assert main(words[:-1]) == 2 and default.read_text() == "mine"


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
    assert "full or a limit" in caught.value.why and str(link) in caught.value.message
    assert target.read_text() == "new" and [path.name for path in target.parent.iterdir()] == ["out"]


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
        with pytest.raises(UserError, match="/dev/full cannot be written"):
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
    assert no_room(caught.value) is not None
    assert no_room(ValueError("the file is too large")) is None


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    words = ["train", "--model_name", str(tiny_model), "--max_samples", "8", "--max_steps", "1"]
    words += ["--train_type", "lora", "--backend", "cpu", "--precision", "fp32", "--output_dir", str(runs)]
    assert main([*words, "--name", "run", "--skip_eval"]) == 0
    return runs / "run" / "adapter"


@pytest.mark.parametrize("command", [["merge"], ["export", "--to", "hf"], ["export", "--to", "gguf"]])
def test_a_disk_that_fills_at_every_tenth_leaves_nothing(
    command: list[str], adapter: Path, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    words = [command[0], str(adapter), *command[1:], "--out", str(tmp_path / "out"), "--backend", "cpu"]
    num_bytes = max(path.stat().st_size for path in tiny_model.iterdir())
    for tenth in range(10):
        capsys.readouterr()
        with file_limit(num_bytes * tenth // 10):
            assert main(words) == 2
        said = capsys.readouterr().err
        assert "disk space" in said and "do:" in said and "Traceback" not in said, said
        assert list(tmp_path.iterdir()) == []
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("command", [["convert", "--to", "hqq"], ["export", "--to", "mlx"]])
def test_a_full_disk_in_a_conversion_is_one_sentence(
    command: list[str], tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("hqq" if "hqq" in command else "mlx_lm")
    words = [command[0], str(tiny_model), *command[1:], "--out", str(tmp_path / "out"), "--backend", "cpu"]
    with file_limit(20_000):
        assert main(words) == 2
    said = capsys.readouterr().err
    assert "not enough disk space" in said and "do:" in said and f"{tmp_path}/." not in said, said
    assert list(tmp_path.iterdir()) == []


def test_a_killed_merge_is_cleared_by_the_next_and_a_living_one_is_not(
    adapter: Path, tmp_path: Path, capsys: Captured, caplog: pytest.LogCaptureFixture
) -> None:
    code = (
        "import os, sys; from pathlib import Path; from crosstune.models.staged import staged\n"
        "with staged(Path(sys.argv[1]), need_bytes=0) as stage:\n"
        "    (stage.scratch / 'half').write_bytes(bytes(5_000_000))\n"
        "    os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    [dead] = leftovers(tmp_path, of=bool)
    # Staged by this process, and by processes of another machine.
    alive, foreign, old = staging_path(tmp_path / "out"), *(tmp_path / f".out.{n * 32}" for n in "01")
    for folder in (alive, foreign, old):
        folder.mkdir()
    os.utime(old, (0, time.time() - 8 * 86400))
    assert main(["merge", str(adapter), "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 0
    assert not dead.exists() and alive.exists() and foreign.exists() and not old.exists()
    assert dead.name in caplog.text and "5 MB" in caplog.text and alive.name not in caplog.text


def test_the_second_of_two_merges_into_one_folder_says_what_to_do(
    adapter: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crosstune.results import merge

    def other_first(*args: Any) -> list[str]:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").write_text("{}")
        return []

    monkeypatch.setattr(merge, "chat_problems", other_first)
    assert main(["merge", str(adapter), "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 2
    assert "is not empty" in (said := capsys.readouterr().err) and "do:" in said
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "config.json"]


@pytest.mark.parametrize("command", [["export", "--to", "hf"], ["convert", "--to", "hqq"]])
def test_a_model_with_bad_weights_is_the_users_to_mend(
    command: list[str], tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    words = [command[0], str(model), *command[1:], "--out", str(tmp_path / "out"), "--backend", "cpu"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "not finite" in said and "bug" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_journal_continues_only_its_own_request(tmp_path: Path) -> None:
    output, said = tmp_path / "out.jsonl", list[str]()

    def journal(request: Any, *, block: int = 1) -> Journal:
        return Journal(output, request, say=said.append, block=block)

    rows = [{"n": 1, "x": 0.1}, {"n": 2, "x": None}, {"n": 3, "x": "\ud83d\n"}]
    with journal({"a": 1}) as first:
        first.add(rows[:1])
        first.add(rows[1:])
        with pytest.raises(UserError, match="is in use"), journal({"a": 1}):
            pass
    partial = first.path
    assert partial is not None and partial.name == "out.jsonl.partial" and not said
    with partial.open("ab") as file:
        file.write(b'{"n": 4, "x')
    with journal({"a": 1}) as second:
        assert second.rows == rows
        second.add([{"n": 5}])
    assert said == [f"continues after 3 finished rows in {partial}"]
    with journal({"a": 1}, block=3) as third:  # the last block is incomplete
        assert third.rows == rows
    with journal({"a": 1}) as fourth:
        assert fourth.rows == rows
    with journal({"a": 2}) as fifth:
        assert fifth.rows == []
        fifth.add([1])
    assert said[-1].endswith("keeps the rows of a different request")
    assert (tmp_path / "out.jsonl.partial~1").read_bytes().count(b"\n") == 4
    fifth.remove()
    with journal({"a": 1}):  # nothing was finished
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl.partial~1"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop"])
def test_a_journal_that_is_no_regular_file_is_rejected(kind: str, tmp_path: Path) -> None:
    """A device would be read without an end."""
    partial = tmp_path / "out.jsonl.partial"
    if kind == "pipe":
        os.mkfifo(partial)
    elif kind == "folder":
        partial.mkdir()
    else:
        partial.symlink_to("/dev/zero" if kind == "device" else partial.name)
    with (
        pytest.raises(UserError, match="cannot be read") as caught,
        Journal(tmp_path / "out.jsonl", 1, say=print),
    ):
        pass
    assert str(partial) in caught.value.message and "a " in caught.value.why


def kill_when_kept(command: list[object], partial: Path, *, num_lines: int) -> None:
    """Kill a command when its journal has lines."""
    program = warm.start(warm.MAIN, *map(str, command))
    while program.poll() is None:
        if partial.exists() and partial.read_bytes().count(b"\n") >= num_lines:
            program.kill()
            break
        time.sleep(0.005)
    code, said = program.end()
    assert code == -signal.SIGKILL, said


@pytest.mark.slow
def test_answers_continue_after_a_kill(tiny_model: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(30)))
    output, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    words = ["generate", tiny_model, "--prompt_file", tmp_path / "prompts.txt", "--batch_size", "3"]
    words += ["--max_new_tokens", "12", "--backend", "cpu", "--temperature", "1"]
    kill_when_kept([*words, "--output", output], tmp_path / "answers.jsonl.partial", num_lines=8)
    assert not output.exists()
    assert main([*map(str, words), "--output", str(output)]) == 0
    assert "continues after" in capsys.readouterr().err
    assert main([*map(str, words), "--output", str(whole)]) == 0
    assert output.read_text() == whole.read_text() and output.read_text().count("\n") == 30
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "answers.jsonl",
        "prompts.txt",
        "whole.jsonl",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("killed_in", ["answers", "scores"])
def test_pairs_continue_after_a_kill(
    killed_in: str, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(20)))
    slow = "import time\ndef score(prompt, answer):\n    time.sleep(0.005)\n    return -len(answer)\n"
    (tmp_path / "judge.py").write_text(slow)
    output, whole = tmp_path / "pairs.jsonl", tmp_path / "whole.jsonl"
    words = ["pairs", "make", tiny_model, "--prompts", tmp_path / "prompts.txt", "--backend", "cpu"]
    words += ["--judge", f"{tmp_path}/judge.py:score", "--max_new_tokens", "6"]
    partial = "pairs.jsonl.partial" if killed_in == "answers" else "pairs.jsonl.scores.partial"
    kill_when_kept([*words, "--out", output], tmp_path / partial, num_lines=8)
    assert not output.exists()
    assert main([*map(str, words), "--out", str(output)]) == 0
    assert capsys.readouterr().err.count("continues after") == (1 if killed_in == "answers" else 2)
    assert main([*map(str, words), "--out", str(whole)]) == 0
    assert output.read_text() == whole.read_text() and output.read_text().count("\n") == 20
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    assert names == ["judge.py", "pairs.jsonl", "prompts.txt", "whole.jsonl"]


@pytest.mark.parametrize("to", ["file", "pipe"])
def test_verdicts_continue_after_a_kill_and_go_into_pipes(
    to: str, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    items, output = tmp_path / "items.jsonl", tmp_path / "verdicts.jsonl"
    rows = [{"task": f"Add {n} and {n}.", "answer": str(2 * n)} for n in range(48)]
    items.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["judge", "predict", str(tiny_model), "--input", str(items), "--backend", "cpu"]
    words += ["--batch_size", "1", "--output", str(output)]
    if to == "pipe":
        os.mkfifo(output)
        found: list[str] = []
        reader = threading.Thread(target=lambda: found.append(output.read_text()))
        reader.start()
        assert main(words) == 0
        reader.join()
        assert found[0].count("\n") == 48 and stat.S_ISFIFO(output.stat().st_mode)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["items.jsonl", "verdicts.jsonl"]
        return
    kill_when_kept(list(words), tmp_path / "verdicts.jsonl.partial", num_lines=17)
    assert main(words) == 0
    assert "continues after" in capsys.readouterr().err
    continued = output.read_text()
    assert continued.count("\n") == 48
    assert main([*words, "--overwrite"]) == 0
    assert output.read_text() == continued
    assert "continues after" not in capsys.readouterr().err


@pytest.fixture(scope="module")
def latent_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("latents")
    pairs = grammar_pairs(home / "pairs", count=60)
    words = ["train", "--recipe", "latent_diffusion", "--dataset", str(pairs.folder), "--max_steps", "1"]
    words += ["--hidden_size", "32", "--n_blocks", "1", "--backend", "cpu", "--loss_type", "random"]
    assert main([*words, "--output_dir", str(home), "--name", "run", "--skip_eval"]) == 0
    vectors = np.random.default_rng(0).standard_normal((2100, pairs.dim)).astype(np.float32)
    np.save(home / "vectors.npy", vectors / np.linalg.norm(vectors, axis=1, keepdims=True))
    return home / "run"


def test_decoded_texts_continue_after_a_kill(latent_run: Path, tmp_path: Path, capsys: Captured) -> None:
    output, whole = tmp_path / "texts.jsonl", tmp_path / "whole.jsonl"
    words = ["latents", "decode", str(latent_run), "--vectors", str(latent_run.parent / "vectors.npy")]
    words += ["--device", "cpu", "--steps", "2", "--temperature", "1"]
    kill_when_kept([*words, "--out", output], tmp_path / "texts.jsonl.partial", num_lines=513)
    assert not output.exists()
    assert main([*words, "--out", str(output)]) == 0
    assert "continues after" in capsys.readouterr().err
    assert main([*words, "--out", str(whole)]) == 0
    assert output.read_text() == whole.read_text() and output.read_text().count("\n") == 2100
    assert len({*output.read_text().split("\n")[:512]} & {*output.read_text().split("\n")[512:1024]}) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.jsonl", "whole.jsonl"]


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        (["latents", "build", "grammar", "--max_texts", "400"], 50_000),
        (["latents", "export", "PAIRS", "--layout", "shards"], 1000),
        (["latents", "encode", "RUN", "--text", "the cat", "--device", "cpu"], 100),
    ],
)
def test_latents_on_a_full_disk_leave_nothing(
    words: list[str], limit: int, latent_run: Path, tmp_path: Path, capsys: Captured
) -> None:
    places = {"PAIRS": str(latent_run.parent / "pairs"), "RUN": str(latent_run)}
    words = [*(places.get(word, word) for word in words), "--out", str(tmp_path / "out")]
    with file_limit(limit):
        code, said = main(words), capsys.readouterr().err
    assert code == 2 and "full or a limit" in said and "do:" in said, said
    assert list(tmp_path.iterdir()) == []


# Writers without a staged folder, each with the largest file that it writes.
WRITERS = {
    "adopt": (["adopt", "OUT"], 3141),
    "split": (["judge", "data", "JUDGED", "--split_to", "OUT"], 7400),
    "decode": (["latents", "decode", "RUN", "--text", "the cat", "--steps", "2", "--out", "OUT"], 100),
    "sample": (["latents", "sample", "RUN", "--samples", "3", "--steps", "2", "--out", "OUT"], 1200),
    "train": (["train", "--max_steps=1", "--backend=cpu", "--skip_eval", "--name=out", "--output_dir"], 1000),
}


@pytest.mark.parametrize(
    "writer",
    [name if name in ("adopt", "split") else pytest.param(name, marks=pytest.mark.slow) for name in WRITERS],
)
def test_a_writer_on_a_disk_that_fills_leaves_nothing_and_works_later(
    writer: str, latent_run: Path, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    words, num_bytes = WRITERS[writer]
    judged, place = tmp_path / "judged.jsonl", tmp_path / "place"
    rows = [{"task": f"Add {n} and {n}.", "answer": str(2 * n), "score": n % 11} for n in range(40)]
    judged.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    place.mkdir()
    places = {"OUT": str(place / "out"), "RUN": str(latent_run), "JUDGED": str(judged)}
    words = [places.get(word, word) for word in words]
    words += ["--device", "cpu"] if words[0] == "latents" else []
    words += [str(place), "--model_name", str(tiny_model)] if writer == "train" else []
    for tenth in range(10):
        capsys.readouterr()
        with file_limit(num_bytes * tenth // 10):
            assert main(words) == 2
        said = capsys.readouterr().err
        assert "File too large" in said and "do:" in said and "Traceback" not in said, said
        assert [path.name for path in place.iterdir() if path.name != ".locks"] == []
    assert main(words) == 0


@pytest.mark.slow
def test_a_test_of_a_judge_continues_after_a_kill(tiny_model: Path, tmp_path: Path, capsys: Captured) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    rows = [{"task": f"Add {n} and {n}.", "answer": str(2 * n), "score": n % 11} for n in range(40)]
    data.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["judge", "eval", str(tiny_model), "--dataset", str(data), "--backend", "cpu", "--out", str(out)]
    words += ["--batch_size", "1"]
    kill_when_kept(list(words), out / "test_predictions.json.untrained.partial", num_lines=17)
    assert main(words) == 0
    assert capsys.readouterr().err.count("continues after") == 2
    continued = (out / "test_predictions.json").read_text()
    assert sorted(path.name for path in out.iterdir()) == ["test_metrics.json", "test_predictions.json"]
    assert main(words) == 0
    assert (out / "test_predictions.json").read_text() == continued
