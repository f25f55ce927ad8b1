"""Damaged or hostile files of models, adapters and tokenizers are rejected before a library reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crosstune.core.errors import UserError
from crosstune.data.tokens import tokenizer as reader
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.models.adapter_choice import AdapterSettings, Targets
from crosstune.models.adapter_files import PEFT_WEIGHTS, load_adapter, read_settings, save_adapter
from crosstune.models.folder import add_config_aliases, check_folder
from crosstune.models.identity import read_record
from crosstune.models.mlx_adapters import to_mlx
from crosstune.models.quantized_folder import read_quantization
from crosstune.process.limited_child import run_limited
from crosstune.runs.trained_folder import find_trained

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
    neox = add_config_aliases({"model_type": "gpt_neox", "rope_parameters": rope})
    assert (neox["rotary_emb_base"], neox["rotary_pct"], neox["rope_theta"]) == (500.0, 0.5, 500.0)
    moe = {"model_type": "qwen3_moe", "num_local_experts": 4, "hidden_size": 32, "num_attention_heads": 4}
    spelled = add_config_aliases(moe)
    assert (spelled["num_experts"], spelled["num_local_experts"], spelled["head_dim"]) == (4, 4, 8)
    assert add_config_aliases(moe | {"head_dim": 16})["head_dim"] == 16
    assert "head_dim" not in add_config_aliases(
        {"model_type": "gemma", "hidden_size": 32, "num_attention_heads": 4}
    )


def test_control_characters_in_the_name_of_the_base_are_refused(adapter: Path) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path="\x1b]52;c;aGk=\x07")
    with pytest.raises(UserError) as caught:
        find_trained(str(adapter))
    assert "adapter_config.json" in caught.value.why and str(adapter) in caught.value.message


def hostile(tiny_model: Path, folder: Path, **parts: Any) -> Path:
    shutil.copytree(tiny_model, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))
    return folder


GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10_000}
ONE_SECOND = {"cpu_seconds": 1}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"normalizer": {"type": "Sequence", "normalizers": [GROW] * 3}}, "tokenizer.json cannot be used"),
        ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": r"(a*)*\d"}}}, "tokenizer.json cannot be used"),
        ({"pre_tokenizer": 5}, "tokenizer.json cannot be read"),
        ({"added_tokens": [{"content": "x", "id": -1}]}, "tokenizer.json cannot be read"),
    ],
)
def test_a_tokenizer_that_would_hang_or_grow_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        reader, "run_limited", lambda *words, **limits: run_limited(*words, **limits | ONE_SECOND)
    )
    folder = hostile(tiny_model, tmp_path / "model", **parts)
    with pytest.raises(UserError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / "tokenizer.json") in str(caught.value)


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content | center(10000000000) }}{% endfor %}",
    ],
)
def test_a_template_of_a_model_that_would_hang_or_grow_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, place: str
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        reader, "run_limited", lambda *words, **limits: run_limited(*words, **limits | ONE_SECOND)
    )
    folder = hostile(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    text = json.dumps(settings) if place.endswith(".json") else template
    (folder / place).write_text(text)
    with pytest.raises(UserError, match=f"{place} cannot be used"):
        Tokenizer.from_folder(folder)


def test_a_tokenizer_with_its_own_pattern_is_tried_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path / "cache"))
    pattern = (
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    steps = [SPLIT | {"pattern": {"Regex": pattern}}, byte_level]
    folder = hostile(
        tiny_model, tmp_path / "model", pre_tokenizer={"type": "Sequence", "pretokenizers": steps}
    )
    assert Tokenizer.from_folder(folder).encode("Hello there").ids
    [verdict] = (tmp_path / "cache" / "tokenizers").iterdir()
    assert verdict.stat().st_size == 0
    monkeypatch.setattr("crosstune.data.tokens.tokenizer.run_limited", None)  # a second trial would fail
    assert Tokenizer.from_folder(folder).encode("Hello there").ids


def test_a_token_without_an_embedding_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(UserError, match=r"vocab_size in config\.json is 100"):
        Tokenizer.from_folder(folder).encode("Hello there")


@pytest.mark.parametrize(
    ("file", "contents", "words"),
    [
        ("tokenizer_config.json", {"eos_token": 5}, "at eos_token, got 5"),
        ("tokenizer_config.json", {"chat_template": [{"name": "x"}]}, "at chat_template"),
        ("special_tokens_map.json", {"bos_token": {"text": "x"}}, "at bos_token"),
        ("generation_config.json", {"eos_token_id": "x"}, "at eos_token_id"),
    ],
)
def test_settings_of_a_tokenizer_with_wrong_types(
    tiny_model: Path, tmp_path: Path, file: str, contents: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / file).write_text(json.dumps(contents))
    with pytest.raises(UserError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(folder / file) in str(caught.value)
