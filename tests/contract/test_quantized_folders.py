"""Folders written by the guides' quantization_wrapper: loading, training on them, rejected requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quantization_cases import ADAPTERS, Block, M, inputs, quantized_names, torch
from torch import nn

from crosstune.cli.main import main
from crosstune.core.errors import UserError
from crosstune.machines.probe import load_machine
from crosstune.torch_engine.loading.adapters import AdapterSettings, add_adapters
from crosstune.torch_engine.loading.prequantized import read_prequantized
from quantization_wrapper import (
    FallbackAdapter,
    HQQAdapter,
    QuantizationConfig,
    QuantizationMethod,
    QuantoAdapter,
    create_quantization_adapter,
)


@pytest.mark.parametrize(("kind", "options"), ADAPTERS)
def test_saved_models_come_back_bit_for_bit(kind: Any, options: Any, block: Block, tmp_path: Path) -> None:
    dtype = torch.bfloat16
    adapter = kind(QuantizationConfig(**options | {"quant_scale": False, "layer_configs": {"leave": 16}}))
    model = adapter.quantize_model(block.to(dtype))
    adapter.save_quantized_model(model, tmp_path)
    described = {"crosstune.json", "crosstune_quantization.json", "quantized.safetensors"}
    plain = {"crosstune.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == (plain if kind is FallbackAdapter else described)
    again = kind(adapter.config).load_quantized_model(tmp_path, Block())
    assert_same(again, model)
    x = inputs().to(dtype)
    assert torch.equal(again(x), model(x))


@pytest.mark.parametrize(
    ("method", "is_tied"), [(M.BNB_NF4, False), (M.HQQ_4BIT, True), (M.QUANTO_INT4, False), (M.NONE, True)]
)
def test_transformers_models_come_back_without_being_built(
    method: QuantizationMethod, is_tied: bool, llama: Any, tmp_path: Path
) -> None:
    if is_tied:
        llama.config.tie_word_embeddings = True
        llama.lm_head.weight = llama.model.embed_tokens.weight
    adapter = create_quantization_adapter(
        "cpu", QuantizationConfig(method=method), machine=load_machine("cpu-laptop")
    )
    adapter.quantize_model(llama)
    adapter.save_quantized_model(llama, tmp_path)
    again = adapter.load_quantized_model(tmp_path)
    assert type(again) is type(llama)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == is_tied
    assert_same(again, llama)
    tokens = torch.arange(20)[None]
    assert torch.equal(again(tokens).logits, llama.eval()(tokens).logits)


def assert_same(again: nn.Module, model: nn.Module) -> None:
    ours, theirs = again.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert quantized_names(again) == quantized_names(model)
    for name in quantized_names(model):
        assert f"{name}.stored.packed" in theirs
        left, right = again.get_submodule(name).stored, model.get_submodule(name).stored
        assert torch.equal(left.dequantize(torch.float32), right.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (M.HQQ_4BIT, "--quantization_backend hqq"),
        (M.BNB_NF4, "--quantization_backend bnb"),
        (M.QUANTO_INT8, "--quantization_backend quanto --n_bits 8"),
        (M.NONE, None),
    ],
)
def test_a_saved_folder_is_trained_over(
    method: QuantizationMethod, words: str | None, llama: Any, tmp_path: Path
) -> None:
    """By the command, and with the very weights that were saved."""
    other_bits = {} if method is M.NONE else {"layers.0.mlp.up_proj": {"method": M.HQQ, "bits": 8}}
    config = QuantizationConfig(method=method, layer_configs=other_bits)
    adapter = create_quantization_adapter("cpu", config, machine=load_machine("cpu-laptop"))
    adapter.save_quantized_model(adapter.quantize_model(llama), tmp_path / "q")
    if words is not None:
        held = read_prequantized(tmp_path / "q")
        assert held is not None and held.layers == quantized_names(llama)
        for name in held.layers:
            ours = held.stored(name, torch.device("cpu")).dequantize(torch.float32)
            assert torch.equal(ours, llama.get_submodule(name).dequantize_weights(torch.float32)), name
    data = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Say blue."}, {"role": "assistant", "content": "blue"}]
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(4)))
    asked = f"--backend cpu --precision fp32 --skip_eval --max_steps 1 --batch_size 2 --output_dir {tmp_path}/runs"
    kind = "lora" if words is None else f"qlora {words}"
    command = f"train --model_name {tmp_path}/q --dataset {data} --train_type {kind} {asked} --name run"
    assert main(command.split()) == 0
    assert (tmp_path / "runs" / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_folder_of_another_model_is_not_written_into(llama: Any, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    adapter = HQQAdapter()
    adapter.quantize_model(llama)
    with pytest.raises(UserError, match="a different model"):
        adapter.save_quantized_model(llama, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    for _ in range(2):  # its own folder is replaced
        adapter.save_quantized_model(llama, tmp_path / "mine")


def test_damaged_and_foreign_folders_are_refused(block: Block, tmp_path: Path) -> None:
    adapter = HQQAdapter()
    with pytest.raises(UserError, match=r"crosstune\.json"):
        adapter.load_quantized_model(tmp_path)
    adapter.save_quantized_model(adapter.quantize_model(block), tmp_path)
    with pytest.raises(ValueError, match="HQQAdapter"):
        QuantoAdapter().load_quantized_model(tmp_path, Block())
    with pytest.raises(UserError, match="build the model yourself"):
        adapter.load_quantized_model(tmp_path)
    with pytest.raises(UserError, match="no layer enter"):
        adapter.load_quantized_model(tmp_path, nn.Linear(2, 2))
    path = tmp_path / "quantized.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="checksum"):
        adapter.load_quantized_model(tmp_path, Block())


def test_adapters_do_not_go_into_the_base(block: Block, tmp_path: Path) -> None:
    adapter = HQQAdapter()
    settings = AdapterSettings(rank=2, alpha=2.0, dropout=0.0, rank_stabilized=False, magnitudes=False)
    add_adapters(adapter.quantize_model(block), targets="enter", settings=settings, seed=0)
    with pytest.raises(UserError, match="adapter"):
        adapter.save_quantized_model(block, tmp_path)
