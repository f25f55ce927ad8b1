"""Merged folders have the logits of the trained model and the weights of PEFT's merge; wrong requests are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import train_step
from transformers import AutoModelForCausalLM

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.model_folders import AdapterFolder, DenseWeights
from crosstune.core.quantization import read_spec
from crosstune.data.batches.token_batch import TokenBatch, pad_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.staged import staged
from crosstune.models.tiny import tiny_model as make_tiny
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.results import merge as engine
from crosstune.torch_engine.session.session import TorchSession

TURNS = [
    [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} it is, " * n}]
    for n, word in enumerate(["red", "green", "blue"], start=1)
]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"train_type": "lora"},
    "dora": {"train_type": "dora", "lora_rank": 4},
    "rslora": {"train_type": "lora", "use_rslora": True, "lora_rank": 16, "lora_alpha": 8},
    "qlora": {"train_type": "qlora", "quantization_backend": "bnb"},
    "hqq_dora": {"train_type": "hqq_dora", "lora_rank": 4},
    "quanto_lora": {"train_type": "lora", "quantization_backend": "quanto", "n_bits": 8},
}


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    tokenizer = Tokenizer.from_folder(tiny_model)
    examples = [encode_conversation(turns, tokenizer, index=i, whole=False) for i, turns in enumerate(TURNS)]
    return [pad_rows(examples, pad_id=0)]


def train(
    model: Path, window: list[TokenBatch], folder: Path, *, lr: float = 1e-2, **options: Any
) -> tuple[TorchSession, Path]:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(model)} | options
    session = open_torch(make_plan(make_config(**asked)), model_folder=model)
    for _ in range(4):
        train_step(session, window, lr=lr)
    return session, session.save_result(folder)


def logits(model: Any, window: list[TokenBatch]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(window[0].input_ids).long()).logits


def merged(adapter: Path, base: Path, out: Path) -> Any:
    """Merge with the engine alone, into the weights that training saw."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    spec = json.loads((adapter / "crosstune.json").read_text())["quantization"]
    folder = AdapterFolder(path=adapter, settings=settings)
    engine.write_dense(out, DenseWeights(folder=base, adapter=folder, quantization=read_spec(spec)))
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, window: list[TokenBatch], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tiny_model, window, tmp_path_factory.mktemp("run"))[1]


@pytest.mark.parametrize(("method", "is_tied"), [*((method, False) for method in METHODS), ("dora", True)])
def test_a_merged_folder_has_the_logits_of_the_trained_session(
    tiny_model: Path, tied_model: Path, window: list[TokenBatch], tmp_path: Path, method: str, is_tied: bool
) -> None:
    from peft import AutoPeftModelForCausalLM

    base = tied_model if is_tied else tiny_model
    session, adapter = train(base, window, tmp_path, **METHODS[method])
    ours = merged(adapter, base, tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits(session.model, window)
    assert (logits(plain, window) - expected).abs().max() > 0.05, "nothing was trained"
    torch.testing.assert_close(logits(ours, window), expected, rtol=0, atol=1e-4)
    if session.plan.quantizer == "none" and not is_tied:
        theirs = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).merge_and_unload()
        for name, weight in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], weight, rtol=0, atol=1e-5, msg=name)


def test_an_adapter_may_name_layers_that_its_model_lacks(adapter: Path, tmp_path: Path) -> None:
    """PEFT allows it, while each name in --lora_target_modules must match."""
    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy, ignore=shutil.ignore_patterns("SHA256SUMS"))
    settings = json.loads((copy / "adapter_config.json").read_text())
    settings["target_modules"].append("c_attn")
    (copy / "adapter_config.json").write_text(json.dumps(settings))
    assert main(["merge", str(copy), "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 0


def test_the_report_compares_both_values_of_into(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter = train(tiny_model, window, tmp_path, **METHODS["qlora"])
    for into in ("original", "dequantized"):
        out = tmp_path / into
        words = ["merge", str(adapter), "--into", into, "--out", str(out), "--dtype", "fp32", "--json"]
        assert main([*words, "--backend", "cpu"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["agreement"]["max_abs"] < 1e-4 and report["verified"]
        assert report["against_trained"]["dequantized"]["max_abs"] < 1e-4
        assert report["against_trained"]["original"]["max_abs"] > 1e-2
        assert json.loads((out / "crosstune.json").read_text())["merged"]["into"] == into
        assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.float32
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "dequantized", "original"]


@pytest.mark.parametrize(("lr", "bits", "warns"), [(1e-5, 16, True), (1e-5, 32, False), (1e-2, 16, False)])
def test_rounding_that_undoes_a_short_training_is_warned_of(
    tiny_model: Path,
    window: list[TokenBatch],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    lr: float,
    bits: int,
    warns: bool,
) -> None:
    _, adapter = train(tiny_model, window, tmp_path, lr=lr)
    dtype = {16: "bf16", 32: "fp32"}[bits]
    assert main(["merge", str(adapter), "--dtype", dtype, "--backend", "cpu", "--json"]) == 0
    warnings = json.loads(capsys.readouterr().out)["warnings"]
    assert [("rounding" in each, "--dtype fp16 or fp32" in each) for each in warnings] == [
        (True, True)
    ] * warns


def test_another_base_is_refused(
    tiny_model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny(tmp_path / "other", seed=5)
    words = ["merge", str(adapter), "--base", str(other), "--out", str(tmp_path / "out"), "--backend", "cpu"]
    assert main(words) == 2
    answer = capsys.readouterr().err
    assert "different base" in answer and str(other) in answer and str(tiny_model) in answer
    assert not (tmp_path / "out").exists()
    assert main([*words, "--force"]) == 0
    assert "different base" in capsys.readouterr().out
    other = make_tiny(tmp_path / "narrow", hidden=32, num_heads=2, num_kv_heads=1)
    assert main(["merge", str(adapter), "--base", str(other), "--force", "--backend", "cpu"]) == 2
    assert "does not match the base" in capsys.readouterr().err


def test_a_whole_model_has_nothing_to_merge(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_model, window, tmp_path, train_type="full")
    (tmp_path / "plan.json").write_text(json.dumps({"method": "full"}))
    assert main(["merge", str(tmp_path), "--backend", "cpu"]) == 2
    answer = capsys.readouterr().err
    assert "nothing to merge" in answer and "full" in answer


def test_the_output_folder_and_the_disk_space_are_checked_first(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "notes.txt").write_text("mine")
    assert main(["merge", str(adapter), "--out", str(taken), "--backend", "cpu"]) == 2
    assert "is not empty" in capsys.readouterr().err
    with (
        pytest.raises(UserError, match="choose an --out on a larger disk"),
        staged(tmp_path / "huge", need_bytes=10**18),
    ):
        pass
    assert not (tmp_path / "huge").exists()


def test_an_interrupted_merge_leaves_nothing(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **options: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "fold", stop)
    assert main(["merge", str(adapter), "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_merge_is_kept_as_unverified(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = engine.fold
    monkeypatch.setattr(
        engine, "fold", lambda weight, parts, *, scale, form: right(weight, parts, scale=scale / 2, form=form)
    )
    assert main(["merge", str(adapter), "--out", str(tmp_path / "out"), "--backend", "cpu"]) == 2
    assert "out.unverified" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["out.unverified"]


def test_prompts_that_share_a_pass_have_the_logits_of_each_alone(tiny_model: Path) -> None:
    plan = make_plan(make_config(backend="cpu", precision="fp32", model_name=str(tiny_model)))
    session: Any = open_torch(plan, model_folder=tiny_model)
    prompts = [[5 + (n * k) % 200 for k in range(n)] for n in (1, 90, 7, 300, 300, 2)]
    together = session.logits(prompts)
    for prompt, found in zip(prompts, together, strict=True):
        (alone,) = session.logits([prompt])
        assert found.shape == alone.shape
        torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(alone), rtol=0, atol=1e-4)
