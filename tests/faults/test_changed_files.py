"""Files that changed between two commands: a base, an adapter, evaluation data. Each is found before it is used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from injection.bench import Bench, make_model, read_bits, write_chats

from crosstune.cli.main import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("changed"))


def flip_every(path: Path, every: int) -> None:
    raw = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    for place in range(start, len(raw), every):
        raw[place] ^= 1
    path.write_bytes(raw)


@pytest.fixture(scope="module")
def trained(bench: Bench) -> Path:
    folder = bench.home / "trained"
    assert bench.start("lora", folder).wait().code == 0
    return folder


@pytest.mark.parametrize(
    ("command", "every"), [("generate", 7), *((name, 10**6) for name in ("merge", "export", "train"))]
)
def test_a_damaged_adapter_is_not_used(
    bench: Bench, trained: Path, tmp_path: Path, capsys: Captured, command: str, every: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    flip_every(run / "adapter" / "adapter_model.safetensors", every)
    words = {
        "generate": ["generate", str(run), "--prompt", "count 3"],
        "merge": ["merge", str(run), "--out", str(tmp_path / "merged")],
        "export": ["export", str(run), "--to", "hf", "--out", str(tmp_path / "out")],
        "train": bench.words("lora", tmp_path / "next", base_adapter=str(run / "adapter")),
    }[command]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "adapter_model.safetensors has changed" in said and "Traceback" not in said
    assert not (tmp_path / "merged").exists() and not (tmp_path / "out").exists()


def change_weights(model: Path, data: Path) -> None:
    flip_every(model / "model.safetensors", 10**6)


def change_config(model: Path, data: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))


def change_evaluation(model: Path, data: Path) -> None:
    write_chats(data, num=8, word="recite")


def test_a_run_is_not_resumed_over_changed_files(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    good = tmp_path / "good"
    make_model(good / "model")
    write_chats(good / "val.jsonl", num=8)
    now = tmp_path / "now"
    shutil.copytree(good, now)
    options = {
        "model_name": now / "model",
        "eval_dataset": now / "val.jsonl",
        "skip_eval": False,
        "resume": "auto",
    }
    assert bench.start("lora", tmp_path / "run", **options).wait().code == 0
    for change, named, allowed in (
        (change_weights, "model:", "model"),
        (change_config, "config.json of the model", "model"),
        (change_evaluation, "evaluation data", "eval_data"),
    ):
        shutil.rmtree(now)
        shutil.copytree(good, now)
        change(now / "model", now / "val.jsonl")
        shutil.copytree(tmp_path / "run", tmp_path / named)
        words = bench.words("lora", tmp_path / named, **options, max_steps=5)
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "does not match the checkpoint" in said and named in said
        assert main([*words, "--allow_mismatch", allowed]) == 0


def test_a_changed_model_that_crosstune_wrote_is_not_used(
    bench: Bench, trained: Path, tmp_path: Path, capsys: Captured
) -> None:
    merged = tmp_path / "merged"
    assert main(["merge", str(trained), "--out", str(merged)]) == 0
    flip_every(merged / "model.safetensors", 10**6)
    assert main(bench.words("lora", tmp_path / "next", model_name=merged)) == 2
    assert "model.safetensors has changed" in capsys.readouterr().err


def test_an_adapter_is_not_used_over_a_changed_base(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    model, run, out = make_model(tmp_path / "model"), str(tmp_path / "run"), str(tmp_path / "out")
    shutil.copytree(model, tmp_path / "good")
    assert bench.start("lora", tmp_path / "run", model_name=model).wait().code == 0
    for change in (change_weights, change_config):
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "good", model)
        change(model, bench.data)
        for words in (
            ["generate", run, "--prompt", "count 3"],
            ["checkpoint", "export", run, "--out", out],
            ["merge", run, "--out", out],
        ):
            assert main(words) == 2, words
            said = capsys.readouterr().err
            assert "different base" in said or "is not the model" in said
            assert not (tmp_path / "out").exists()


def test_a_converted_base_is_known_by_its_own_bytes(bench: Bench, tmp_path: Path, capsys: Captured) -> None:
    """Its record of the source counts only while its weights are those that were written."""
    exported = tmp_path / "exported"
    assert main(["export", str(bench.model), "--to", "hf", "--out", str(exported)]) == 0
    options = {"model_name": exported, "resume": "auto"}
    assert bench.start("lora", tmp_path / "run", **options).wait().code == 0
    flip_every(exported / "model.safetensors", 10**6)
    (exported / "SHA256SUMS").unlink()
    assert main(bench.words("lora", tmp_path / "run", **options, max_steps=6)) == 2
    assert "does not match the checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("metrics", ['{"step": "x"}\n', "garbage\n"])
def test_damaged_logs_do_not_keep_a_run_from_continuing(bench: Bench, tmp_path: Path, metrics: str) -> None:
    folder = bench.copy_halfway("lora", tmp_path / "run")
    for name, text in (("metrics.jsonl", metrics), ("plan.json", "garbage"), ("summary.json", "[" * 5000)):
        (folder / name).write_text(text)
    ended = bench.again("lora", folder).wait()
    assert ended.code == 0 and "Traceback" not in ended.said, ended
    found, wanted = read_bits(folder), bench.reference("lora")
    assert found["state"] == wanted["state"] and found["result"] == wanted["result"]


def test_a_run_past_the_steps_that_are_asked_for_is_left_as_it_was(
    bench: Bench, trained: Path, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(tmp_path / "run"), "--max_steps", "2"]) == 2
    assert "step 4" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
