"""Merges by MLX: the same weights as PEFT's merge, and bases that MLX quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="the mlx extra is not installed")

from support import chat, tiny_of

from crosstune.cli.main import main
from crosstune.models.adapter_files import copy_template
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.models.weights import read_arrays, to_float32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "turns.jsonl"
    path.write_text("".join(json.dumps(chat(f"Say {n}", f"{n} " * 4)) + "\n" for n in range(12)))
    return path


def train(model: Path, data: Path, folder: Path, *words: str) -> Path:
    options = ["--backend", "mlx", "--model_name", str(model), "--dataset", str(data), "--skip_eval"]
    options += ["--max_steps", "3", "--lr", "1e-2", "--output_dir", str(folder), "--name", "run"]
    assert main(["train", *options, *words]) == 0
    return folder / "run"


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*words, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def weights(folder: Path) -> dict[str, Any]:
    return {
        name: to_float32(kind, array)
        for name, (kind, array) in read_arrays(folder / "model.safetensors").items()
    }


@pytest.mark.parametrize(("method", "tied"), [("lora", False), ("dora", True)])
def test_peft_merges_to_the_same_weights(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], method: str, tied: bool
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = make_tiny(tmp_path / "base", tied=tied)
    run = train(base, data, tmp_path, "--train_type", method, "--precision", "fp32")
    report = report_of(capsys, "merge", str(run), "--backend", "mlx")
    assert report["verified"] and report["checked_by"] == "mlx-lm" and report["agreement"]["relative"] < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = peft.PeftModel.from_pretrained(plain, str(run / "adapter")).merge_and_unload().state_dict()
    found = weights(run / "merged")
    assert found.keys() == weights(base).keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name].float().numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    changed = [name for name, array in weights(base).items() if not np.array_equal(array, found[name])]
    assert changed and all("_proj" in name for name in changed)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "4-bit folder"])
def test_adapters_of_experts_merge(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], packed: bool
) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    base = tiny_of("qwen3_moe", tmp_path / "base", vocab)
    for path in (*tiny_model.glob("*token*"), *tiny_model.glob("*.jinja")):
        shutil.copy(path, base / path.name)
    words = ["--precision", "fp32", "--lora_target_modules", "all"]
    model = base
    if packed:
        model, words = tmp_path / "four", [*words, "--train_type", "qlora", "--group_size", "32"]
        form = ["--n_bits", "4", "--group_size", "32", "--out", str(model)]
        assert main(["convert", str(base), "--to", "mlx", *form]) == 0
    run = train(model, data, tmp_path, *words)
    settings = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert any("experts" in name for name in settings["target_parameters"])
    into = ["--into", "dequantized"] if packed else []
    report = report_of(capsys, "merge", str(run), "--backend", "mlx", *into)
    assert report["verified"] and report["agreement"]["relative"] < 1e-4
    if packed:
        return
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    expected = peft.PeftModel.from_pretrained(plain, str(run / "adapter")).merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype="float32").state_dict()
    assert merged.keys() == expected.keys()
    for name, array in merged.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_an_adapter_over_a_quantized_base_merges_both_ways(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(
        tiny_model, data, tmp_path, "--train_type", "qlora", "--group_size", "32", "--precision", "fp32"
    )
    costs = {}
    for into in ("original", "dequantized"):
        out = tmp_path / into
        report = report_of(capsys, "merge", str(run), "--into", into, "--out", str(out))
        assert report["verified"] and report["agreement"]["relative"] < 1e-4
        assert not (json.loads((out / "config.json").read_text())).get("quantization")
        costs[into] = report["against_trained"][into]["relative"]
    assert costs["dequantized"] < 1e-4 < costs["original"]
    eight = str(tmp_path / "eight")
    words = f"export {run} --to mlx --n_bits 8 --group_size 32 --out {eight}".split()
    report = report_of(capsys, *words)
    assert report["verified"] and report["unquantized"]["verified"] and report["n_bits"] == 8
    words = ["generate", eight, "--backend", "mlx", "--prompt", "Say 3", "--max_new_tokens", "3"]
    assert main(words) == 0


def test_a_quantized_folder_without_a_record_has_no_original(
    tiny_model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    four = tmp_path / "four"
    words = ["--n_bits", "4", "--group_size", "32", "--out", str(four)]
    assert main(["convert", str(tiny_model), "--to", "mlx", *words]) == 0
    run = train(four, data, tmp_path, "--train_type", "qlora", "--group_size", "32")
    report = report_of(capsys, "merge", str(run), "--out", str(tmp_path / "recorded"))
    assert report["verified"] and report["into"] == "original"
    for name in ("crosstune.json", "SHA256SUMS"):  # as mlx-lm itself makes one
        (four / name).unlink()
    capsys.readouterr()
    assert main(["merge", str(run)]) == 2
    assert "--into dequantized" in capsys.readouterr().err
    report = report_of(capsys, "merge", str(run), "--into", "dequantized")
    assert report["verified"]
    assert set(weights(run / "merged")) == set(weights(tiny_model))


def test_a_base_without_a_chat_template_gets_the_adapters(tmp_path: Path) -> None:
    adapter, bare, own = tmp_path / "adapter", tmp_path / "bare", tmp_path / "own"
    for folder in (adapter, bare, own):
        folder.mkdir()
    (adapter / "chat_template.jinja").write_text("trained")
    (own / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own"}))
    copy_template(adapter, bare)
    copy_template(adapter, own)
    assert (bare / "chat_template.jinja").read_text() == "trained"
    assert not (own / "chat_template.jinja").exists()
