"""A disk that fills, a kill or a second command costs nothing that is done, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import warm
from injection.disks import file_limit
from latents import grammar_pairs
from safetensors.numpy import load_file, save_file

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.files.atomic_files import leftovers, staging_path
from crosstune.files.journal import Journal

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    words = ["train", "--model_name", str(tiny_model), "--max_samples", "8", "--max_steps", "1"]
    words += ["--train_type", "lora", "--backend", "cpu", "--precision", "fp32", "--output_dir", str(runs)]
    assert main([*words, "--name", "run", "--skip_eval"]) == 0
    return runs / "run" / "adapter"


PUSH = ["push", "--to", "org/name", "--what", "merged", "--dry_run"]


@pytest.mark.parametrize("command", [["merge"], ["export", "--to", "hf"], ["export", "--to", "gguf"], PUSH])
def test_a_disk_that_fills_leaves_nothing(
    command: list[str],
    adapter: Path,
    tiny_model: Path,
    tmp_path: Path,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = [command[0], str(adapter), *command[1:], "--out", str(tmp_path / "out"), "--backend", "cpu"]
    if command is PUSH:
        words = [command[0], str(adapter.parent), *words[2:-2]]
        monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
    num_bytes = max(path.stat().st_size for path in tiny_model.iterdir())
    for tenth in (0, 1, 9):  # the first file, small files, and the end of the weights
        capsys.readouterr()
        with file_limit(num_bytes * tenth // 10):
            assert main(words) == 2
        said = capsys.readouterr().err
        assert "disk space" in said or (command is PUSH and "File too large" in said), said
        assert "do:" in said and "Traceback" not in said and "/." not in said, said
        assert list(tmp_path.iterdir()) == []
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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


ANSWER = ["generate", "--prompt", "Hi", "--temperature", "1"]
JUDGE = ["judge", "predict"]


@pytest.mark.parametrize("command", [["export", "--to", "hf"], ["convert", "--to", "hqq"], ANSWER, JUDGE])
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
    out, items = str(tmp_path / "out"), model / "items.jsonl"
    items.write_text('{"task": "t", "answer": "a"}\n')
    words = [command[0], str(model), *command[1:], "--out", out]
    if command is ANSWER:
        words = [command[0], str(model), *command[1:]]
    elif command is JUDGE:
        words = [*command[:2], str(model), "--input", str(items), "--output", out]
    words += ["--backend", "cpu"]
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
    key, one, two, three = partial.read_bytes().splitlines(keepends=True)
    for lines in (one + two.replace(b'"n": 2', b'"n": 7') + three, one + three, one + one + two, one + key):
        partial.write_bytes(key + lines)
        with journal({"a": 1}) as damaged:
            assert damaged.rows == rows[:1]
            damaged.add(rows[1:])
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
def test_pairs_continue_after_a_kill(tiny_model: Path, tmp_path: Path, capsys: Captured) -> None:
    """While they are scored; the journal of the answers is that of `generate`."""
    (tmp_path / "prompts.txt").write_text("".join(f"Say {number}.\n" for number in range(20)))
    slow = "import time\ndef score(prompt, answer):\n    time.sleep(0.005)\n    return -len(answer)\n"
    (tmp_path / "judge.py").write_text(slow)
    output, whole = tmp_path / "pairs.jsonl", tmp_path / "whole.jsonl"
    words = ["pairs", "make", tiny_model, "--prompts", tmp_path / "prompts.txt", "--backend", "cpu"]
    words += ["--judge", f"{tmp_path}/judge.py:score", "--max_new_tokens", "6"]
    kill_when_kept([*words, "--out", output], tmp_path / "pairs.jsonl.scores.partial", num_lines=8)
    assert not output.exists()
    assert main([*map(str, words), "--out", str(output)]) == 0
    assert capsys.readouterr().err.count("continues after") == 2
    assert main([*map(str, words), "--out", str(whole)]) == 0
    assert output.read_text() == whole.read_text() and output.read_text().count("\n") == 20
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__")
    assert names == ["judge.py", "pairs.jsonl", "prompts.txt", "whole.jsonl"]


@pytest.mark.parametrize("to", ["file", "pipe"])
def test_verdicts_continue_after_a_kill_and_go_into_pipes(
    to: str, tiny_model: Path, tmp_path: Path, capsys: Captured
) -> None:
    items, output = tmp_path / "items.jsonl", tmp_path / "verdicts.jsonl"
    rows = [{"task": f"Add {n} and {n}.", "answer": str(2 * n)} for n in range(24)]
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
        assert found[0].count("\n") == 24 and stat.S_ISFIFO(output.stat().st_mode)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["items.jsonl", "verdicts.jsonl"]
        return
    kill_when_kept(list(words), tmp_path / "verdicts.jsonl.partial", num_lines=17)
    assert main(words) == 0
    assert "continues after" in capsys.readouterr().err
    continued = output.read_text()
    assert continued.count("\n") == 24
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
    assert code == 2 and re.search(r"File too large|requested and \d+ written", said) and "do:" in said, said
    assert list(tmp_path.iterdir()) == []


# Writers without a staged folder, each with the largest file that it writes.
WRITERS = {
    "adopt": (["adopt", "OUT"], 3141),
    "split": (["judge", "data", "JUDGED", "--split_to", "OUT"], 7400),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_on_a_disk_that_fills_leaves_nothing_and_works_later(
    writer: str, tmp_path: Path, capsys: Captured
) -> None:
    words, num_bytes = WRITERS[writer]
    judged, place = tmp_path / "judged.jsonl", tmp_path / "place"
    rows = [{"task": f"Add {n} and {n}.", "answer": str(2 * n), "score": n % 11} for n in range(40)]
    judged.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    place.mkdir()
    places = {"OUT": str(place / "out"), "JUDGED": str(judged)}
    words = [places.get(word, word) for word in words]
    for tenth in (0, 1, 5, 9):
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
