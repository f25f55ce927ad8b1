"""GGUF files: a model stored as by llama.cpp is restored; unsupported files are rejected."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from crosstune.core.errors import UserError
from crosstune.files.safetensors_header import read_header
from crosstune.models import gguf_metadata, gguf_writer
from crosstune.models.locate import locate, shape
from crosstune.models.tiny import tiny_model
from crosstune.models.weights import bfloat16_bits

gguf = pytest.importorskip("gguf", reason="needs the extra crosstune[gguf]")
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def stored_name(name: str) -> str:
    if not name.startswith("model.layers."):
        plain = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        return plain[name.removesuffix(".weight")] + ".weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def interleave(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """llama.cpp's order: within a head, row i of the first half is followed by row i of the second half."""
    rows = []
    for head in np.split(weight, heads):
        first, second = np.split(head, 2)
        for pair in zip(first, second, strict=True):
            rows += pair
    return np.stack(rows)


def read_weights(folder: Path) -> dict[str, NDArray[Any]]:
    path = folder / "model.safetensors"
    header, raw = read_header(path)
    data = path.read_bytes()[len(raw) :]
    kinds = {"F32": np.float32, "BF16": np.uint16}
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], kinds[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
    }


def write_gguf(
    path: Path, folder: Path, *, quantization: str = "F32", without: str = "", **changes: Any
) -> Path:
    """A GGUF file of a tiny model; `changes` replace metadata keys, whose dots are written as two underscores."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    metadata = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.rope.freq_base": config["rope_theta"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (folder / "chat_template.jinja").read_text(),
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    for key, value in metadata.items():
        if key != "architecture":
            writer.add_bool(key, value) if isinstance(value, bool) else add[type(value)](key, value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, weight in read_weights(folder).items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleave(
                weight, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            )
        packed = weight.ndim == 2 and quantization != "F32"
        data = gguf.quants.quantize(weight, kind) if packed else weight
        if stored_name(name) != without:
            writer.add_tensor(stored_name(name), data, raw_dtype=kind if packed else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("gguf") / "tiny")


def refused(path: Path, cache: Path) -> str:
    with pytest.raises(UserError) as caught:
        locate(str(path))
    assert not [entry for entry in (cache / "models").glob("*") if not entry.name.startswith(".")]
    return str(caught.value)


def test_float32_weights_are_kept(tmp_path: Path, original: Path) -> None:
    found = locate(str(write_gguf(tmp_path / "model.gguf", original))).path
    weights, expected = read_weights(found), read_weights(original)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    assert json.loads((found / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_comes_back(tmp_path: Path, tied: bool) -> None:
    folder = tiny_model(tmp_path / "tiny", tied=tied)
    path = write_gguf(tmp_path / "my model.gguf", folder, quantization="BF16")
    seen: list[tuple[str, int, int | None]] = []
    found = locate(str(path), progress=lambda *step: seen.append(step))
    assert found.source == "gguf"
    assert found.path.name.startswith("my-model-")
    assert ("convert", 2 * 139_584 - tied * 2 * 512 * 64, 2 * 139_584 - tied * 2 * 512 * 64) in seen
    weights = read_weights(found.path)
    expected = {name: bfloat16_bits(weight) for name, weight in read_weights(folder).items()}
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(weight, expected[name], err_msg=name)
    config, asked = (json.loads((place / "config.json").read_text()) for place in (found.path, folder))
    assert config == {**asked, "dtype": "bfloat16", "bos_token_id": None, "pad_token_id": None}
    assert (found.path / "chat_template.jinja").read_text() == (folder / "chat_template.jinja").read_text()
    assert shape(str(path)) == shape(str(folder))


def test_quantized_weights_are_decoded(tmp_path: Path, original: Path) -> None:
    path = write_gguf(tmp_path / "q8.gguf", original, quantization="Q8_0")
    weights = read_weights(locate(str(path)).path)
    for name, weight in read_weights(original).items():
        decoded = (weights[name].astype(np.uint32) << 16).view(np.float32)
        assert np.abs(decoded - weight).max() < 0.01 * np.abs(weight).max(), name


def test_the_same_file_is_converted_once_and_a_changed_one_again(tmp_path: Path, original: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", original)
    first = locate(str(path)).path
    stamp = (first / "crosstune.json").stat().st_mtime_ns
    assert locate(str(path)).path == first
    assert (first / "crosstune.json").stat().st_mtime_ns == stamp
    write_gguf(path, original, quantization="Q8_0")
    assert locate(str(path)).path != first


def test_the_tokenizer_comes_back(tmp_path: Path, original: Path) -> None:
    from tokenizers import Tokenizer

    text = "<|im_start|>user\nWhat is the capital of France in 2024?<|im_end|>\n  ünïcödé 日本 🙂"
    expected = Tokenizer.from_file(str(original / "tokenizer.json"))
    plain = locate(str(write_gguf(tmp_path / "plain.gguf", original))).path
    found = Tokenizer.from_file(str(plain / "tokenizer.json"))
    assert found.encode(text).ids == expected.encode(text).ids
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text

    changes = {"tokenizer__ggml__bos_token_id": 1, "tokenizer__ggml__add_bos_token": True}
    with_bos = locate(str(write_gguf(tmp_path / "bos.gguf", original, **changes))).path
    found = Tokenizer.from_file(str(with_bos / "tokenizer.json"))
    assert found.encode("hello").ids == [1, *expected.encode("hello").ids]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architecture": "gemma"}, "its architecture is 'gemma'"),
        ({"tokenizer__ggml__pre": "tekken"}, "it splits text as 'tekken'; supported: gpt-2, smollm"),
        ({"llama__rope__scaling__type": "yarn"}, "its RoPE is scaled ('yarn')"),
        ({"llama__rope__dimension_count": 8}, "only a part of each head"),
        ({"llama__block_count": 3}, "it lacks blk.2.attn_norm.weight"),
        ({"llama__block_count": 1}, "Llama models do not have blk.1."),
        ({"llama__feed_forward_length": 64}, "blk.0.ffn_gate.weight has the shape"),
        ({"llama__context_length": "long"}, "its metadata has 'long' for llama.context_length"),
        ({"llama__block_count": 2_000_000_000}, "has 2000000000 for llama.block_count"),
        ({"tokenizer__ggml__merges": ["a b", "no-pair"]}, "which is not a pair of tokens"),
        ({"without": "token_embd.weight"}, "it has no token embeddings"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tmp_path: Path, original: Path, changes: dict[str, Any], reason: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", original, **changes)
    assert reason in refused(path, tmp_path)


def test_a_file_cut_short_or_of_another_kind(tmp_path: Path, original: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", original)
    whole = path.read_bytes()
    within = whole.index(b"tokenizer.ggml.tokens") + 100
    for data, why in (
        (whole[:-1000], f"of {len(whole):,}"),
        (whole[:within], "the file ends within 'tokenizer.ggml.tokens'"),
        (whole[:10], "it ends within its header"),
        (b"", "it is empty"),
        (b"PK\3\4" * 100, "it does not begin with GGUF"),
    ):
        path.write_bytes(data)
        found = refused(path, tmp_path)
        assert "is not a complete GGUF file" in found and why in found, found


def test_the_sizes_of_blocks_are_those_of_the_gguf_package() -> None:
    sizes = {kind.value: size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {kind: sizes[kind] for kind in gguf_metadata._TENSORS} == gguf_metadata._TENSORS
    written = {gguf.GGMLQuantizationType[kind].value for kind in gguf_writer.RECIPES.values()}
    assert written <= gguf_metadata._TENSORS.keys()


def test_bfloat16_rounds_to_nearest_even() -> None:
    half = np.array(
        [1.0, 1.00390625, 1.01171875, -1.00390625, 1.00390637, np.inf, 3.4e38, 0.0, 1e-40], np.float32
    )
    assert [f"{bits:04x}" for bits in bfloat16_bits(half)] == [
        "3f80",
        "3f80",  # halfway between 1 and the next: the even one
        "3f82",
        "bf80",
        "3f81",
        "7f80",
        "7f80",  # beyond the largest bfloat16
        "0000",
        "0001",
    ]
    nan = np.array([0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan((bfloat16_bits(nan).astype(np.uint32) << 16).view(np.float32)).all()


def test_counts_beyond_the_file_are_refused_before_the_package_reads_them(
    tmp_path: Path, original: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", original)
    good = path.read_bytes()
    tokens = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4 + 4
    name = good.index(b"token_embd.weight")
    dimensions = name + len(b"token_embd.weight")
    for place, form, value, reason in (  # the package refuses damaged tensors itself
        (tokens, "<Q", 2**61, "2,305,843,009,213,693,952 entries"),
        (tokens + 8, "<Q", 2**40, "is declared with 1,099,511,627,776 bytes"),
        (8, "<Q", 2**40, "1,099,511,627,776 tensors"),
        (name - 8, "<Q", 2**63, "m.gguf"),
        (dimensions + 4, "<Q", 0, "m.gguf"),
        (dimensions + 4, "<Q", 2**40, "m.gguf"),
        (4, "<I", 9, "it has version 9"),
    ):
        raw = bytearray(good)
        struct.pack_into(form, raw, place, value)
        path.write_bytes(raw)
        assert reason in refused(path, tmp_path), reason
    path.write_bytes(good[: len(good) // 3])
    assert "m.gguf is not a complete GGUF file" in refused(path, tmp_path)
    path.write_bytes(good[:-1])
    assert f"it has {len(good) - 1:,} bytes of {len(good):,}" in refused(path, tmp_path)
    path.write_bytes(good[: good.index(b"llama.context_length") + len("llama.context_length") + 6])
    assert "the file ends within 'llama.context_length'." in refused(path, tmp_path)
