"""Folders of quantized weights: from one library to another, with the error of direct quantization, and trained over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import train_step
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.data.batches.token_batch import TokenBatch, pad_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.loading.prequantized import read_prequantized
from crosstune.torch_engine.loading.stream import find_tensors, read_tensor
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.quantized import QuantLinear, open_quantizer, quantize_weight
from crosstune.torch_engine.session.session import TorchSession

CPU = torch.device("cpu")
TURNS = [{"role": "user", "content": "Say blue."}, {"role": "assistant", "content": "blue it is, blue it is"}]


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    example = encode_conversation(TURNS, Tokenizer.from_folder(tiny_model), index=0, whole=False)
    return [pad_rows([example], pad_id=0)]


@pytest.fixture(scope="module")
def hf_bnb(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as transformers and bitsandbytes save it in 4 bits."""
    folder = tmp_path_factory.mktemp("models") / "hf-bnb"
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32, quantization_config=settings
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, folder)
    return folder


def convert(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["convert", *words, "--json", "--backend", "cpu"]) == 0, capsys.readouterr().err
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def dense(folder: Path) -> dict[str, torch.Tensor]:
    held = read_prequantized(folder)
    if held is None:
        return {name: read_tensor(place) for name, place in find_tensors(folder).items()}
    return {f"{layer}.weight": held.stored(layer, CPU).dequantize(torch.float32) for layer in held.layers}


def direct(weights: dict[str, torch.Tensor], quantizer: str) -> dict[str, torch.Tensor]:
    spec = QuantSpec(quantizer=quantizer, bits=4, group_size=64)
    return {
        name: quantize_weight(weight, spec, torch.float32).dequantize(torch.float32)
        for name, weight in weights.items()
    }


def relative(found: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    error = sum(float(((found[name] - reference[name]) ** 2).sum()) for name in found)
    return float((error / sum(float((reference[name] ** 2).sum()) for name in found)) ** 0.5)


def open_session(model: Path, **options: Any) -> TorchSession:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(model), "train_type": "qlora"} | options
    return open_torch(make_plan(make_config(**asked)), model_folder=model)


def test_a_bitsandbytes_folder_is_read_as_bitsandbytes_reads_it(hf_bnb: Path, tiny_model: Path) -> None:
    held = read_prequantized(hf_bnb)
    assert held is not None and len(held.layers) == 14
    assert held.spec == QuantSpec(quantizer="bnb", bits=4, group_size=64, kind="nf4", double=True)
    import bitsandbytes.functional as bnb

    model = AutoModelForCausalLM.from_pretrained(hf_bnb)
    for name, weight in dense(hf_bnb).items():
        theirs = model.get_submodule(name.removesuffix(".weight")).weight
        assert torch.equal(bnb.dequantize_4bit(theirs.data, theirs.quant_state).float(), weight), name


@pytest.mark.parametrize(("to", "start"), [("quanto", "dequantized"), ("hqq", "original")])
def test_from_bitsandbytes(
    hf_bnb: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, start: str
) -> None:
    """Either way, the result is exactly what the other library makes of the weights it started from."""
    out = tmp_path / "out"
    original = ["--original", str(tiny_model)] if start == "original" else []
    report = convert(capsys, str(hf_bnb), "--from", "bnb", "--to", to, "--out", str(out), *original)
    assert report["started_from"] == start
    quantized, plain = dense(hf_bnb), dense(tiny_model)
    reference = {name: (plain if original else quantized)[name] for name in quantized}
    expected = direct(reference, to)
    found = dense(out)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert report["weights"]["relative"] == pytest.approx(relative(found, reference), rel=1e-5)
    assert 0.05 < report["weights"]["relative"] < 0.15
    assert report["logits"]["relative"] < 0.2


def test_there_and_back(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """none -> hqq -> bnb -> none: from the recorded original weights, and without them."""
    home = tmp_path / "tiny"
    shutil.copytree(tiny_model, home)
    convert(capsys, str(home), "--from", "none", "--to", "hqq", "--out", str(tmp_path / "hqq"))
    report = convert(
        capsys, str(tmp_path / "hqq"), "--from", "hqq", "--to", "bnb", "--out", str(tmp_path / "bnb")
    )
    assert report["started_from"] == "original" and report["reference"] == str(home)
    plain = dense(home)
    quantized = dense(tmp_path / "bnb")
    expected = direct({name: plain[name] for name in quantized}, "bnb")
    assert all(torch.equal(quantized[name], weight) for name, weight in expected.items())
    report = convert(capsys, str(tmp_path / "bnb"), "--to", "none", "--out", str(tmp_path / "back"))
    assert report["weights"]["relative"] == 0
    assert all(torch.equal(weight, plain[name]) for name, weight in dense(tmp_path / "back").items())

    home.rename(tmp_path / "gone")
    report = convert(capsys, str(tmp_path / "bnb"), "--to", "none", "--out", str(tmp_path / "made"))
    assert report["started_from"] == "dequantized" and report["logits"]["max_abs"] < 1e-5
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "made").state_dict()
    assert all(torch.equal(made[name], weight) for name, weight in quantized.items())


def test_training_over_a_converted_folder_equals_quantizing_while_loading(
    tiny_model: Path,
    window: list[TokenBatch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantizer = "quanto"
    convert(capsys, str(tiny_model), "--to", quantizer, "--out", str(tmp_path / "q"))
    there = open_session(tiny_model, quantization_backend=quantizer)
    expected = [train_step(there, window, lr=5e-3).loss for _ in range(4)]
    module = open_quantizer(QuantSpec(quantizer=quantizer, bits=4, group_size=64))

    def refuse(*args: Any) -> None:
        raise AssertionError("nothing is to be quantized again")

    monkeypatch.setattr(module, "quantize", refuse)
    monkeypatch.setattr("crosstune.planner.gather.probe_machine", lambda **_: there.plan.machine)
    here = open_session(tmp_path / "q", quantization_backend=quantizer)
    assert sum(isinstance(m, QuantLinear) for m in here.model.modules()) == 14
    assert [train_step(here, window, lr=5e-3).loss for _ in range(4)] == expected


def test_an_adapter_over_a_converted_folder_merges_both_ways(
    hf_bnb: Path,
    tiny_model: Path,
    window: list[TokenBatch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    convert(capsys, str(tiny_model), "--to", "hqq", "--out", str(tmp_path / "q"))
    session = open_session(tmp_path / "q", quantization_backend="hqq")
    train_step(session, window, lr=1e-2)
    adapter = session.save_result(tmp_path)
    for into in ("original", "dequantized"):
        words = ["merge", str(adapter), "--into", into, "--out", str(tmp_path / into), "--json"]
        assert main([*words, "--backend", "cpu"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["verified"] and report["against_trained"]["dequantized"]["max_abs"] < 1e-4
        AutoModelForCausalLM.from_pretrained(tmp_path / into)
    other = open_session(hf_bnb, quantization_backend="bnb")
    train_step(other, window, lr=1e-2)
    adapter = other.save_result(tmp_path / "other")
    assert main(["merge", str(adapter), "--backend", "cpu"]) == 2
    assert "--into dequantized" in capsys.readouterr().err
    assert main(["merge", str(adapter), "--into", "dequantized", "--backend", "cpu"]) == 0


def test_a_folder_is_trained_only_as_what_it_holds(hf_bnb: Path) -> None:
    for options, words in [
        ({"quantization_backend": "hqq"}, "--quantization_backend bnb --n_bits 4"),
        ({"quantization_backend": "bnb", "n_bits": 8}, "bnb with 8 bits"),
        ({"train_type": "lora"}, "not quantized"),
        ({"train_type": "full"}, "only adapters can be trained"),
    ]:
        with pytest.raises(UserError, match=words):
            open_session(hf_bnb, **options)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--from", "hqq", "--to", "bnb"], "it has 4-bit bnb weights"),
        (["--from", "none", "--to", "bnb"], "does not match --from none"),
        (["--to", "bnb", "--quant_type", "nf4"], "already quantized in exactly this way"),
        (["--to", "hqq", "--group_size", "100"], "does not divide"),
        (["--to", "hqq", "--n_bits", "5"], "does not support 5-bit weights"),
    ],
)
def test_what_cannot_be_converted_is_said(
    hf_bnb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], answer: str
) -> None:
    assert main(["convert", str(hf_bnb), *words, "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 2
    assert answer in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_another_model_is_not_the_original(
    hf_bnb: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny(tmp_path / "other", seed=9)
    words = ["convert", str(hf_bnb), "--to", "hqq", "--original", str(other), "--out", str(tmp_path / "out")]
    assert main([*words, "--backend", "cpu"]) == 2
    assert "does not contain the original weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_training_takes_the_quantization_from_the_folder(tiny_model: Path, tmp_path: Path) -> None:
    """Nobody has to repeat on the command line what the folder says of itself; who contradicts it is refused."""
    out = tmp_path / "hqq"
    assert main(["convert", str(tiny_model), "--to", "hqq", "--n_bits", "8", "--out", str(out)]) == 0
    words = ["--backend", "cpu", "--max_steps", "2", "--skip_eval", "--output_dir", str(tmp_path / "runs")]
    plan = make_plan(make_config(model_name=str(out), train_type="qlora", backend="cpu"))
    assert (plan.quantizer, plan.n_bits) == ("hqq", 8)
    assert main(["train", "--model_name", str(out), "--train_type", "qlora", "--name", "a", *words]) == 0
    assert main(["train", "--model_name", str(out), "--train_type", "full", "--name", "b", *words]) == 2


def test_eight_bits_that_transformers_saved_are_recognised(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int8"
    settings = BitsAndBytesConfig(load_in_8bit=True)
    AutoModelForCausalLM.from_pretrained(tiny_model, quantization_config=settings).save_pretrained(folder)
    shutil.copy(tiny_model / "tokenizer.json", folder)
    with pytest.raises(UserError, match="quantized by bitsandbytes with 8 bits"):
        open_session(folder, train_type="qlora", n_bits=8)


def test_a_converted_folder_is_read_by_crosstune_alone(
    tiny_model: Path, tmp_path: Path, window: list[TokenBatch], capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would fill the layers it does not find with random numbers, so it must not find the file."""
    folder = Path(convert(capsys, str(tiny_model), "--to", "bnb", "--out", str(tmp_path / "own"))["path"])
    with pytest.raises(OSError, match="no file named model"):
        AutoModelForCausalLM.from_pretrained(folder)
    words = ["generate", str(folder), "--prompt", "Say blue.", "--max_new_tokens", "3", "--backend", "cpu"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "Say blue."
    loss = open_session(folder, train_type="qlora").evaluate(window).loss
    [weights] = folder.glob("*.safetensors")
    weights.rename(folder / "model.safetensors")  # as folders made before have it
    assert open_session(folder, train_type="qlora").evaluate(window).loss == loss
