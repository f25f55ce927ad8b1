"""Names of models and runs: the meaning of each form, errors for unknown names, and shapes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from crosstune.core.errors import UserError
from crosstune.models.bundled import BUNDLED
from crosstune.models.identity import identity
from crosstune.models.locate import locate, shape
from crosstune.models.tiny import tiny_model
from crosstune.runs.trained_folder import find_trained


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def refused(name: object) -> str:
    with pytest.raises(UserError) as caught:
        locate(str(name))
    return str(caught.value)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))


def test_a_folder_is_used_where_it_is(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate(str(model))
    assert (found.name, found.path, found.source) == (str(model), model, "folder")
    monkeypatch.chdir(model.parent)
    assert locate("model").path == model
    assert locate("./model/").path == model


def test_the_tiny_model_has_a_bundled_name(tmp_path: Path) -> None:
    found = locate("tiny-random")
    assert found.source == "bundled"
    assert found.path == tmp_path / "models" / "tiny-random"
    assert locate(str(found.path)).source == "folder"


def test_a_bundled_name_comes_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_model(tmp_path / "tiny-random", hidden=32)
    monkeypatch.chdir(tmp_path)
    assert locate("tiny-random").source == "bundled"
    assert locate("./tiny-random").source == "folder"


def test_folder_without_config(model: Path) -> None:
    (model / "config.json").unlink()
    assert "it has no config.json" in refused(model)
    (model / "adapter_config.json").write_text("{}")
    assert "is an adapter, not a model" in refused(model)


def test_folder_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert "it has no *.safetensors file" in refused(model)
    (model / "m.gguf").write_bytes(b"GGUF")
    assert f"specify the file itself: {model / 'm.gguf'}" in refused(model)
    (model / "weights.npz").write_bytes(b"")
    assert "its weights are in weights.npz, the format of early MLX releases" in refused(model)
    assert "crosstune convert MODEL --to mlx" in refused(model)
    (model / "pytorch_model.bin").write_bytes(b"")
    assert "its weights are pickles (pytorch_model.bin)" in refused(model)


def test_folder_without_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in refused(model)


def test_folder_with_weights_cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert f"the file has {len(data) - 1:,} bytes" in refused(model)
    for junk in (b"", b"short", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"):
        weights.write_bytes(junk)
        assert "is not a complete safetensors file" in refused(model)


def test_a_bundled_name_is_made_again_from_its_own_source(tmp_path: Path) -> None:
    path = locate("tiny-random").path
    marker = json.loads((path / "crosstune.json").read_text())
    (path / "crosstune.json").write_text(json.dumps(marker | {"source": {"kind": "hub"}}))
    assert locate("tiny-random").path == path
    assert json.loads((path / "crosstune.json").read_text())["source"] == {"kind": "random", "seed": 0}


def test_folder_with_a_missing_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing weight files: model-00002-of-00002.safetensors" in refused(model)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    assert "There is no folder" in refused(tmp_path / "nowhere")
    assert "There is no folder" in refused("./nowhere/at-all")
    assert "There is no file" in refused("nowhere.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert f"specify the folder instead: {tmp_path}" in refused(tmp_path / "model.safetensors")
    (tmp_path / "link").symlink_to("nowhere")
    assert "is a broken link, not a model" in refused(tmp_path / "link")
    assert "is a device, not a model" in refused(os.devnull)


def test_shapes_without_a_download(model: Path, tmp_path: Path) -> None:
    bundled = shape("smollm2-135m")
    assert bundled is not None
    assert (bundled.num_parameters, bundled.num_layers, bundled.source) == (134_515_008, 30, "config")
    tiny = shape(str(model))
    assert tiny == BUNDLED["tiny-random"].shape
    assert tiny is not None
    assert tiny.num_parameters == 139_584
    known = shape("some-org/Llama-2-7b-chat-hf")
    assert known is not None
    assert (known.num_parameters, known.source) == (6_738_415_616, "table")
    assert shape("some-org/never-downloaded-7b") is None, (
        "a size in a name tells neither layers nor vocabulary"
    )
    assert shape("some-org/never-downloaded") is None
    assert not (tmp_path / "models").exists()


def test_shape_from_a_config_without_weights(model: Path) -> None:
    counted = shape(str(model))
    (model / "model.safetensors").unlink()
    assert shape(str(model)) == counted
    config = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10, "num_attention_heads": 2}
    mixture = {**config, "intermediate_size": 16, "num_local_experts": 4, "tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(mixture))
    found = shape(str(model))
    assert found is not None
    assert found.num_parameters == 10 * 8 + 4 * 8 * 8 + 4 * 3 * 8 * 16 + 3 * 8
    (model / "config.json").write_text('{"model_type": "unheard-of"}')
    assert shape(str(model)) is None


def test_identity_tells_weights_apart(model: Path, tmp_path: Path) -> None:
    same, other = tiny_model(tmp_path / "same"), tiny_model(tmp_path / "other", seed=1)
    assert identity(same) == identity(model)
    assert identity(other)["weights_sha256"] != identity(model)["weights_sha256"]
    assert identity(other)["config_sha256"] == identity(model)["config_sha256"]
    (same / "config.json").write_text((same / "config.json").read_text().replace("2048", "1024"))
    assert identity(same)["weights_sha256"] == identity(model)["weights_sha256"]
    assert identity(same)["sha256"] != identity(model)["sha256"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "second-try"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("runs/dmo", "did you mean runs/demo"),
        ("runs/nothing-like-it", "second-try"),
        ("./runs/dmo", "did you mean runs/demo"),
    ],
)
def test_near_runs_are_listed(target: str, hint: str, runs: Path) -> None:
    with pytest.raises(UserError, match=f"There is no run {target}") as caught:
        find_trained(target)
    assert hint in caught.value.do


@pytest.mark.parametrize("target", ["org/model", "smollm2-135m", "model.gguf", "something"])
def test_names_of_models_are_left_alone(target: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_trained(target).base == target
    monkeypatch.chdir(runs)
    assert find_trained(target).base == target
