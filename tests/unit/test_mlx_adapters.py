"""Adapters between PEFT's layout and mlx-lm's, without either library: bit-exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.models.adapter_choice import AdapterSettings, Targets
from crosstune.models.adapter_files import load_adapter, save_adapter
from crosstune.models.mlx_adapters import MLX_WEIGHTS, adapter_form, to_mlx, to_peft
from crosstune.models.weights import Tensor, read_arrays, write_safetensors

LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj")


def make(folder: Path, *, rank: int, dora: bool, rslora: bool = False) -> AdapterSettings:
    random = np.random.default_rng(rank)
    settings = AdapterSettings(rank=rank, alpha=7.0, dropout=0.1, rank_stabilized=rslora, magnitudes=dora)
    tensors: dict[str, Any] = {}
    for place, layer in enumerate(LAYERS):
        tensors[f"{layer}.lora_A.weight"] = random.standard_normal((rank, 24 + place)).astype(np.float32)
        tensors[f"{layer}.lora_B.weight"] = random.standard_normal((40, rank)).astype(np.float32)
        if dora:
            tensors[f"{layer}.lora_magnitude_vector"] = random.standard_normal(40).astype(np.float32)
    base = folder.parent / "base"
    base.mkdir(exist_ok=True)
    (base / "tokenizer.json").write_text("{}")
    save_adapter(
        folder,
        tensors,
        settings=settings,
        targets=Targets(modules=["q_proj", "up_proj"]),
        base=base,
        record={"a": 1},
    )
    shapes = {name: array.shape for name, array in tensors.items()}
    for name, array in load_adapter(folder, shapes, settings=settings).items():
        np.testing.assert_array_equal(array, tensors[name])
    return settings


@pytest.mark.parametrize(("rank", "dora"), [(1, False), (3, False), (8, True)])
def test_there_and_back_is_the_same_file(tmp_path: Path, rank: int, dora: bool) -> None:
    settings = make(tmp_path / "peft", rank=rank, dora=dora, rslora=rank == 3)
    to_mlx(tmp_path / "peft", tmp_path / "mlx")
    to_peft(tmp_path / "mlx", tmp_path / "back")
    for name in ("adapter_model.safetensors", "adapter_config.json", "crosstune.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "peft" / name).read_bytes(), name
    config = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == ("dora" if dora else "lora")
    assert config["lora_parameters"]["scale"] == pytest.approx(settings.scale)
    assert config["lora_parameters"]["keys"] == sorted(LAYERS)
    shapes = {name: values.shape for name, (_, values) in read_arrays(tmp_path / "mlx" / MLX_WEIGHTS).items()}
    assert shapes[f"{LAYERS[1]}.lora_a"] == (25, rank)
    assert shapes[f"{LAYERS[1]}.lora_b"] == (rank, 40)
    assert (adapter_form(tmp_path / "mlx"), adapter_form(tmp_path / "peft")) == ("mlx", "peft")
    assert adapter_form(tmp_path) is None


def test_an_adapter_of_mlx_lm_itself_becomes_peft(tmp_path: Path) -> None:
    """In bfloat16, with no word of crosstune's or PEFT's in it."""
    folder = tmp_path / "mlx"
    folder.mkdir()
    bits = np.arange(6 * 2, dtype=np.uint16).reshape(6, 2)
    tensors = {f"{LAYERS[0]}.lora_a": bits, f"{LAYERS[0]}.lora_b": bits.T.copy()}
    write_safetensors(
        folder / MLX_WEIGHTS,
        [Tensor(name=n, dtype="BF16", shape=a.shape, rows=[a]) for n, a in tensors.items()],
    )
    config = {
        "fine_tune_type": "lora",
        "num_layers": 4,
        "lora_parameters": {"rank": 2, "scale": 20.0, "dropout": 0.0},
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not record its base model"):
        to_peft(folder, tmp_path / "no")
    to_peft(folder, tmp_path / "peft", base="org/model")
    written = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["target_modules"]) == (2, 40.0, [LAYERS[0]])
    dtype, values = read_arrays(tmp_path / "peft" / "adapter_model.safetensors")[
        f"base_model.model.{LAYERS[0]}.lora_A.weight"
    ]
    assert dtype == "BF16"
    np.testing.assert_array_equal(values, bits.T)
    to_mlx(tmp_path / "peft", tmp_path / "again")
    for name, (_, values) in read_arrays(tmp_path / "again" / MLX_WEIGHTS).items():
        np.testing.assert_array_equal(values, tensors[name])


def test_matrices_of_several_experts_have_no_other_form(tmp_path: Path) -> None:
    folder = tmp_path / "mlx"
    folder.mkdir()
    stacked = np.zeros((4, 8, 64), np.float32)
    names = [f"model.layers.0.mlp.switch_mlp.up_proj.lora_{part}" for part in "ab"]
    write_safetensors(
        folder / MLX_WEIGHTS,
        [Tensor(name=n, dtype="F32", shape=stacked.shape, rows=[stacked]) for n in names],
    )
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="several experts"):
        to_peft(folder, tmp_path / "peft", base="org/model")


def test_what_is_no_lora_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "peft", rank=2, dora=False)
    path = tmp_path / "peft" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"rank_pattern": {"q_proj": 4}}))
    with pytest.raises(UserError, match="cannot be written for MLX"):
        to_mlx(tmp_path / "peft", tmp_path / "mlx")
    path.write_text("[")
    with pytest.raises(UserError, match="cannot be read"):
        to_mlx(tmp_path / "peft", tmp_path / "mlx")


def test_the_named_base_is_recorded(tmp_path: Path) -> None:
    make(tmp_path / "peft", rank=2, dora=False)
    to_mlx(tmp_path / "peft", tmp_path / "mlx")
    for form, to, key in (("peft", "mlx", "model"), ("mlx", "peft", "base_model_name_or_path")):
        words = ["convert", str(tmp_path / form), "--to", to, "--out", str(tmp_path / f"{form}-{to}")]
        assert main([*words, "--original", str(tmp_path / "base")]) == 0
        written = json.loads((tmp_path / f"{form}-{to}" / "adapter_config.json").read_text())
        assert written[key] == str(tmp_path / "base")
