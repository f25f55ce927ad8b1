"""Model and adapter folders with damaged or hostile files: the file and the field are named before a library reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.core.errors import UserError
from crosstune.models.adapter_choice import AdapterSettings, Targets
from crosstune.models.adapter_files import PEFT_WEIGHTS, load_adapter, read_settings, save_adapter
from crosstune.models.config_spelling import spell_config
from crosstune.models.folder import check_folder
from crosstune.models.identity import read_record
from crosstune.models.mlx_adapters import to_mlx
from crosstune.models.quantized_folder import read_quantization
from crosstune.results.trained_folder import find_trained

SETTINGS = AdapterSettings(rank=2, alpha=4.0, dropout=0.0, rank_stabilized=False, magnitudes=False)
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    tensors = {
        f"{LAYER}.lora_A.weight": np.ones((2, 8), np.float32),
        f"{LAYER}.lora_B.weight": np.ones((8, 2), np.float32),
    }
    save_adapter(
        tmp_path / "adapter",
        tensors,
        settings=SETTINGS,
        targets=Targets(modules=["q_proj"]),
        base=None,
        base_name="x/y",
        record={},
    )
    return tmp_path / "adapter"


def change(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (found | changes).items() if value is not ...}))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_folder(folder)
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_pipe_in_the_folder_is_named(model: Path) -> None:
    os.mkfifo(model / "extra.json")
    refused(model, "extra.json cannot be read.\n  why: it is a named pipe")


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("config.json", {"num_attention_heads": 0}, "config.json cannot be read"),
        ("config.json", {"hidden_size": 2**20}, "and the weight files have"),
        ("model.safetensors.index.json", {"weight_map": ["a"]}, "at weight_map, got ['a']"),
        ("model.safetensors.index.json", {"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors"),
        ("tokenizer_config.json", {"x": json.loads("[" * 90 + "]" * 90)}, "nested deeper"),
    ],
)
def test_fields_of_a_model_folder(model: Path, file: str, changes: dict[str, Any], words: str) -> None:
    check_folder(model)
    change(model / file, **changes)
    refused(model, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": ...}, "it lacks r, which needs an integer of 1 or more"),
        ({"r": 0}, "at r, got 0"),
        ({"lora_alpha": "x"}, "at lora_alpha, got 'x'"),
        ({"target_modules": [5]}, "at target_modules, got [5]"),
        ({"lora_parameters": {"rank": 2}}, "it lacks lora_parameters.scale"),
    ],
)
def test_settings_of_an_adapter(adapter: Path, changes: dict[str, Any], words: str) -> None:
    assert read_settings(adapter)["r"] == 2
    change(adapter / "adapter_config.json", **changes)
    for read in (read_settings, lambda folder: to_mlx(folder, folder.parent / "out")):
        with pytest.raises(UserError) as caught:
            read(adapter)
        assert words in str(caught.value)
        assert str(adapter / "adapter_config.json") in str(caught.value)


def test_an_adapter_in_another_layout_is_not_loaded(adapter: Path) -> None:
    change(adapter / "adapter_config.json", peft_type="LOHA")
    with pytest.raises(UserError, match="unsupported kind of adapter"):
        load_adapter(adapter, {}, settings=SETTINGS)


def test_overlapping_weights_of_an_adapter_are_refused(adapter: Path) -> None:
    path = adapter / PEFT_WEIGHTS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :])
    with pytest.raises(UserError, match="invalid offset"):
        load_adapter(adapter, {}, settings=SETTINGS)


@pytest.mark.parametrize(
    "record",
    [{"base": 5}, {"base": {"identity": "x"}}, {"new_blocks": "x"}, {"converted": {"original": {"path": 5}}}],
)
def test_records_with_wrong_types(tmp_path: Path, record: dict[str, Any]) -> None:
    (tmp_path / "crosstune.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"crosstune\.json cannot be read"):
        read_record(tmp_path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"format": 9}, "has the format 9"),
        ({"format": 2, "spec": {}, "dtype": "float32"}, "it lacks layers"),
        ({"format": 2, "spec": {}, "dtype": "float32", "layers": {"a": {"shape": "x"}}}, "at layers"),
        (
            {
                "format": 2,
                "spec": {"quantizer": "bnb", "bits": "x", "group_size": 1},
                "dtype": "f",
                "layers": {},
            },
            "at bits",
        ),
    ],
)
def test_records_of_quantized_folders(model: Path, record: dict[str, Any], words: str) -> None:
    (model / "crosstune_quantization.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=words):
        read_quantization(model)


def test_names_that_other_readers_know() -> None:
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    neox = spell_config({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (neox["rotary_emb_base"], neox["rotary_pct"], neox["rope_theta"]) == (500.0, 0.5, 500.0)
    moe = {"model_type": "qwen3_moe", "num_local_experts": 4, "hidden_size": 32, "num_attention_heads": 4}
    spelled = spell_config(moe)
    assert (spelled["num_experts"], spelled["num_local_experts"], spelled["head_dim"]) == (4, 4, 8)
    assert spell_config(moe | {"head_dim": 16})["head_dim"] == 16
    assert "head_dim" not in spell_config(
        {"model_type": "gemma", "hidden_size": 32, "num_attention_heads": 4}
    )


def test_control_characters_in_the_name_of_the_base_are_refused(adapter: Path) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path="\x1b]52;c;aGk=\x07")
    with pytest.raises(UserError) as caught:
        find_trained(str(adapter))
    assert "adapter_config.json" in caught.value.why and str(adapter) in caught.value.message
