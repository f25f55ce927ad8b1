"""`save_checkpoint` and `load_checkpoint` of MPSFSDPWrapper, and the import of files of torch.save."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crosstune.checkpoint.read import open_checkpoint
from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.models.identity import source_identity
from mps_fsdp_wrapper import MPSFSDPWrapper


def make(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        x = torch.linspace(-1, 1, 64, dtype=next(model.parameters()).dtype).reshape(8, 8) * (step + 1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_metadata_that_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'head' cannot be saved in a checkpoint"):
        MPSFSDPWrapper().save_checkpoint(make(0)[0], tmp_path / "b", head=nn.Linear(1, 1))


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, path = MPSFSDPWrapper(), tmp_path / "last.pt"
    wrapper.save_checkpoint(make(0)[0], path, epoch=1)

    def fail(*arguments: Any, **named: Any) -> None:
        arguments[1].write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("crosstune.compat.torch_parts.fsdp_checkpoint.save_file", fail)
    with pytest.raises(UserError, match=r"could not be written(.|\n)*No space left"):
        wrapper.save_checkpoint(make(0)[0], path, epoch=2)
    assert wrapper.load_checkpoint(make(1)[0], path)["epoch"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    wrapper, path, (model, optimizer) = MPSFSDPWrapper(), tmp_path / "c.pt", make(0)
    train(model, optimizer, 1)
    wrapper.save_checkpoint(model, path, optimizer=optimizer, epoch=1)
    whole, (other, other_optimizer) = path.read_bytes(), make(1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for position in range(0, len(whole), len(whole) // 20):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(UserError):
            wrapper.load_checkpoint(other, path, optimizer=other_optimizer)
        path.write_bytes(whole[:position])
        with pytest.raises(UserError):
            wrapper.load_checkpoint(other, path, optimizer=other_optimizer)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert not other_optimizer.state


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.place),)


def test_a_pickle_is_refused_and_never_run(tmp_path: Path) -> None:
    payload = Payload(tmp_path / "canary")
    torch.save({"model_state_dict": {}, "more": payload}, tmp_path / "zip.pt")
    torch.save({"more": payload}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(payload))
    for name in ("zip.pt", "old.pt", "plain.pt"):
        with pytest.raises(UserError, match=r"written by torch.save(.|\n)*crosstune checkpoint import"):
            MPSFSDPWrapper().load_checkpoint(make(0)[0], tmp_path / name)
    assert not (tmp_path / "canary").exists()


def test_another_optimizer_or_none_is_explained(tmp_path: Path) -> None:
    wrapper, (model, optimizer) = MPSFSDPWrapper(), make(0)
    train(model, optimizer, 1)
    wrapper.save_checkpoint(model, tmp_path / "with.pt", optimizer=optimizer)
    wrapper.save_checkpoint(model, tmp_path / "without.pt")
    with pytest.raises(UserError, match="does not match this optimizer"):
        wrapper.load_checkpoint(
            model, tmp_path / "with.pt", optimizer=torch.optim.SGD(model.parameters(), lr=1)
        )
    with pytest.raises(UserError, match="has no optimizer state"):
        wrapper.load_checkpoint(model, tmp_path / "without.pt", optimizer=optimizer)
    assert wrapper.load_checkpoint(model, tmp_path / "without.pt", optimizer=optimizer, strict=False)[
        "missing_keys"
    ] == ["optimizer"]
    with pytest.raises(UserError, match="make the optimizer after wrapping"):
        wrapper.save_checkpoint(make(1)[0], tmp_path / "x.pt", optimizer=optimizer)


def test_without_strict_what_only_one_side_has_stays(tmp_path: Path) -> None:
    wrapper, (model, _) = MPSFSDPWrapper(), make(0)
    wrapper.save_checkpoint(model, tmp_path / "a", epoch=3)
    other, longer = make(1)[0], nn.Sequential(*make(2)[0], nn.Linear(4, 2))
    extra = longer[4].weight.clone()
    for target in (other[:2], longer):
        with pytest.raises(UserError, match="not a checkpoint of this model"):
            wrapper.load_checkpoint(target, tmp_path / "a")
        found = wrapper.load_checkpoint(target, tmp_path / "a", strict=False)
        assert found["epoch"] == 3
        assert bool(found["unexpected_keys"]) == (target is not longer)
        assert found["missing_keys"] == (["4.bias", "4.weight"] if target is longer else [])
        assert torch.equal(target[0].weight, model[0].weight)
    assert torch.equal(longer[4].weight, extra)
    for foreign in (nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 3)):  # another shape, no name in common
        with pytest.raises(UserError, match="not a checkpoint of this model"):
            wrapper.load_checkpoint(foreign, tmp_path / "a", strict=False)


@pytest.mark.parametrize(
    ("method", "options", "name", "dtype"),
    [
        ("BNB_NF4", {}, "bnb-4bit", torch.float32),
        ("HQQ_4BIT", {"quant_scale": True}, "hqq-4bit", torch.bfloat16),
        ("QUANTO_INT8", {"quant_type": "float8"}, "quanto-8bit", torch.float32),
    ],
)
def test_a_quantized_model_comes_back_bit_for_bit(
    method: str, options: dict[str, Any], name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    from quantization_wrapper import QuantizationConfig, QuantizationMethod, create_quantization_adapter

    adapter = create_quantization_adapter(
        "cpu", QuantizationConfig(method=QuantizationMethod[method], **options), strict=True
    )

    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = (nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False), nn.LayerNorm(128))
        return adapter.quantize_model(nn.Sequential(*layers).to(dtype))

    wrapper, path = MPSFSDPWrapper(), tmp_path / "q.pt"
    model, other = quantized(0), quantized(1)
    x = torch.linspace(-1, 1, 512).reshape(4, 128).to(dtype)
    expected = model(x)
    assert not torch.equal(other(x), expected)
    wrapper.save_checkpoint(model, path, epoch=3)
    found = wrapper.load_checkpoint(other, path)
    assert (found["epoch"], found["quantization"]) == (3, name)
    assert found["precision"] == {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert torch.equal(other(x), expected)
    for key, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key
    plain = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False), nn.LayerNorm(128))
    with pytest.raises(UserError, match="not a checkpoint of this model"):
        wrapper.load_checkpoint(plain, path)


def test_a_checkpoint_of_another_quantization_is_refused(tmp_path: Path) -> None:
    """All tensors of NF4 and FP4 have the same names, shapes and dtypes."""
    from quantization_wrapper import BitsAndBytesAdapter, QuantizationConfig, QuantizationMethod

    def quantized(kind: str) -> nn.Module:
        config = QuantizationConfig(method=QuantizationMethod.BNB_NF4, quant_type=kind)
        return BitsAndBytesAdapter(config).quantize_model(nn.Sequential(nn.Linear(64, 64)))

    MPSFSDPWrapper().save_checkpoint(quantized("nf4"), tmp_path / "q")
    with pytest.raises(UserError, match="quantized differently"):
        MPSFSDPWrapper().load_checkpoint(quantized("fp4"), tmp_path / "q")


def test_only_one_module_reads_pickles() -> None:
    source = Path(__file__).parents[2] / "src"
    reading = re.compile(
        r"torch\.load\(|pickle\.loads?\(|allow_pickle=True|joblib\.load|shelve\.|marshal\.load|dill"
    )
    found = {
        path.relative_to(source).as_posix(): reading.findall(path.read_text())
        for path in source.rglob("*.py")
    }
    reader = "crosstune/torch_engine/results/import_torch_save.py"
    assert {name: hits for name, hits in found.items() if hits} == {reader: ["torch.load("]}
    assert "weights_only=True" in (source / reader).read_text()


def foreign_state(model_folder: Path, steps: int) -> tuple[dict[str, Any], nn.Module]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(steps):
        ids = torch.arange(number, number + 32).reshape(2, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {
        "model_state_dict": model.state_dict(),
        "optimizer_state_dict": optimizer.state_dict(),
        "backend": "cuda",
        "precision": "bf16",
        "quantization": "bnb-4bit",
        "global_step": steps,
    }
    return state, model


def test_a_file_of_torch_save_becomes_a_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    state, model = foreign_state(tiny_model, 3)
    torch.save(state, tmp_path / "old.pt")
    words = f"--model_name {tiny_model} --train_type full --backend cpu --precision fp32".split()
    assert (
        main(["checkpoint", "import", str(tmp_path / "old.pt"), "--out", str(tmp_path / "run"), *words]) == 0
    )
    found = open_checkpoint(tmp_path / "run" / "checkpoints" / "latest")
    assert (found.step, found.manifest.backend, found.manifest.precision) == (3, "cuda", "bf16")
    assert found.manifest.quantization == "bnb-4bit"
    loaded, numbers = found.load(), {name: n for n, (name, _) in enumerate(model.named_parameters())}
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(loaded.weights[name], parameter.detach().numpy())
        moment = state["optimizer_state_dict"]["state"][numbers[name]]["exp_avg"]
        np.testing.assert_array_equal(loaded.moments["first_moment"][name], moment.numpy())
    words = ["--resume", str(tmp_path / "run"), "--max_steps", "5", "--skip_eval", "--batch_size", "2"]
    assert main(["train", *words]) == 0


def test_a_checkpoint_imported_over_a_converted_folder_continues_there(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A converted folder holds the weights it was made from, and is known by their hash everywhere."""
    state, _ = foreign_state(tiny_model, 3)
    torch.save(state, tmp_path / "old.pt")
    packed, base = tmp_path / "bnb", tmp_path / "dense"
    assert main(["convert", str(tiny_model), "--to", "bnb", "--out", str(packed)]) == 0
    words = ["--to", "none", "--original", "none", "--out", str(base)]
    assert main(["convert", str(packed), *words]) == 0
    words = f"--model_name {base} --train_type full --backend cpu --precision fp32 --out {tmp_path / 'run'}".split()
    assert main(["checkpoint", "import", str(tmp_path / "old.pt"), *words]) == 0
    model = open_checkpoint(tmp_path / "run" / "checkpoints" / "latest").manifest.identity["model"]
    assert model["identity"] == source_identity(base)["weights"] == source_identity(tiny_model)["weights"]
    words = ["--resume", str(tmp_path / "run"), "--max_steps", "5", "--skip_eval", "--batch_size", "2"]
    assert main(["train", *words]) == 0, capsys.readouterr().err


def test_a_file_that_could_run_code_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model_state_dict": {}, "more": Payload(tmp_path / "canary")}, tmp_path / "evil.pt")
    words = ["checkpoint", "import", str(tmp_path / "evil.pt"), "--out", str(tmp_path / "run")]
    assert main([*words, "--model_name", str(tiny_model), "--train_type", "full", "--backend", "cpu"]) == 2
    assert "could run code" in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()
    assert not (tmp_path / "run").exists()


def test_optimizer_state_of_another_order_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, _ = foreign_state(tiny_model, 1)
    state["optimizer_state_dict"]["param_groups"][0]["params"].reverse()
    torch.save(state, tmp_path / "old.pt")
    words = f"--model_name {tiny_model} --train_type full --backend cpu --out {tmp_path / 'run'}".split()
    assert main(["checkpoint", "import", str(tmp_path / "old.pt"), *words]) == 2
    assert "--without_optimizer" in capsys.readouterr().err
    assert main(["checkpoint", "import", str(tmp_path / "old.pt"), *words, "--without_optimizer"]) == 0
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "latest").load().moments == {}
