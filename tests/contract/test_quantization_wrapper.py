"""The guides' quantization_wrapper: every documented name, over real quantizers on the processor."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the guides' adapters quantize torch models")
pytest.importorskip("bitsandbytes", reason="an extra: pip install 'crosstune[bnb]'")
pytest.importorskip("hqq", reason="an extra: pip install 'crosstune[hqq]'")
pytest.importorskip("optimum.quanto", reason="an extra: pip install 'crosstune[quanto]'")

from torch import nn  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import quantization_wrapper  # noqa: E402
from crosstune.cli.main import main  # noqa: E402
from crosstune.core.errors import UserError  # noqa: E402
from crosstune.machines.probe import load_machine  # noqa: E402
from crosstune.torch_engine.adapters import AdapterSettings, add_adapters  # noqa: E402
from crosstune.torch_engine.prequantized import read_prequantized  # noqa: E402
from crosstune.torch_engine.quantized import QuantLinear, stored_bytes  # noqa: E402
from quantization_wrapper import (  # noqa: E402
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    MLXAdapter,
    QuantizationAdapter,
    QuantizationConfig,
    QuantizationMethod,
    QuantizedLinear,
    QuantoAdapter,
    create_quantization_adapter,
    get_recommended_config,
    replace_linear_with_quantized,
    validate_quantization_config,
)

M = QuantizationMethod
NAMES = [
    "BitsAndBytesAdapter",
    "FallbackAdapter",
    "HQQAdapter",
    "MLXAdapter",
    "QuantizationAdapter",
    "QuantizationConfig",
    "QuantizationMethod",
    "QuantizedLinear",
    "QuantoAdapter",
    "create_quantization_adapter",
    "get_recommended_config",
    "replace_linear_with_quantized",
    "validate_quantization_config",
]
FIELDS = [
    "method",
    "bits",
    "group_size",
    "compute_dtype",
    "storage_dtype",
    "double_quant",
    "quant_type",
    "block_size",
    "quant_zero",
    "quant_scale",
    "layer_configs",
    "skip_modules",
    "backend_options",
]
# Largest relative error of weights drawn from a normal distribution, and bits per weight with the scales.
REAL = [
    (BitsAndBytesAdapter, {"method": M.BNB_NF4}, 0.11, 4.3),
    (BitsAndBytesAdapter, {"method": M.BNB_NF4, "double_quant": False}, 0.11, 4.7),
    (BitsAndBytesAdapter, {"method": M.BNB_NF4, "quant_type": "fp4", "block_size": 128}, 0.2, 4.2),
    (BitsAndBytesAdapter, {"method": M.BNB_INT8}, 0.02, 8.3),
    (HQQAdapter, {"method": M.HQQ_4BIT}, 0.12, 4.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 8}, 0.01, 8.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 3, "quant_zero": False}, 0.25, 4.6),
    (HQQAdapter, {"method": M.HQQ, "bits": 2, "group_size": 32, "quant_scale": True}, 0.5, 2.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 1}, 1.2, 1.8),
    (QuantoAdapter, {"method": M.QUANTO_INT8}, 0.015, 8.3),
    (QuantoAdapter, {"method": M.QUANTO_INT8, "quant_type": "float8"}, 0.04, 8.3),
    (QuantoAdapter, {"method": M.QUANTO_INT4, "group_size": 32}, 0.12, 6.1),
    (QuantoAdapter, {"method": M.QUANTO_INT2}, 0.6, 3.1),
    (FallbackAdapter, {"method": M.NONE}, 0.003, 16.0),
]
ADAPTERS = [case[:2] for case in REAL]
IDS = ["-".join(str(getattr(value, "value", value)) for value in case[1].values()) for case in REAL]


class Block(nn.Module):
    """A plain torch model with a bias, a head, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.leave = nn.Linear(128, 64, bias=False)
        self.lm_head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(x))
        x = x + self.attention(x, x, x)[0]
        return self.lm_head(self.leave(x))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


@pytest.fixture
def llama(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model)


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(
        (result.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm()
    )


def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))


def test_documented_names() -> None:
    assert sorted(quantization_wrapper.__all__) == sorted(NAMES)
    assert all(hasattr(quantization_wrapper, name) for name in NAMES)
    assert {
        "BNB_NF4", "BNB_INT8", "HQQ", "HQQ_4BIT", "MLX_INT4", "MLX_INT8",
        "QUANTO_INT2", "QUANTO_INT4", "QUANTO_INT8", "NONE",
    } == set(M.__members__)  # fmt: skip
    assert [item.name for item in fields(QuantizationConfig)] == FIELDS


def test_importing_does_not_load_torch() -> None:
    code = "import sys, quantization_wrapper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_defaults() -> None:
    config = QuantizationConfig()
    assert (config.method, config.bits, config.group_size, config.block_size) == (M.BNB_NF4, 4, 64, 64)
    assert (config.double_quant, config.quant_type) == (True, "nf4")
    assert (config.quant_zero, config.quant_scale) == (True, False)
    assert (config.skip_modules, config.layer_configs, config.backend_options) == (["lm_head"], {}, {})
    assert [QuantizationConfig(method=m).bits for m in (M.BNB_INT8, M.HQQ, M.QUANTO_INT2, M.NONE)] == [
        8,
        4,
        2,
        16,
    ]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_bits_that_exist(bits: int) -> None:
    assert QuantizationConfig(bits=bits).bits == bits


@pytest.mark.parametrize(
    "wrong",
    [
        {"bits": 3},
        {"bits": 5},
        {"bits": 0},
        {"method": M.HQQ, "bits": 6},
        {"method": "gptq"},
        {"group_size": 0},
        {"block_size": -64},
        {"compute_dtype": torch.int8},
        {"layer_configs": {"mlp": {"bit": 4}}},
        {"layer_configs": {"mlp": {"bits": 5}}},
        {"layer_configs": {"mlp": 2}},
        {"layer_configs": {"mlp": "int4"}},
    ],
)
def test_impossible_values_are_refused_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        QuantizationConfig(**wrong)


def test_hqq_has_odd_widths() -> None:
    assert [QuantizationConfig(method=M.HQQ, bits=bits).bits for bits in (1, 3)] == [1, 3]


def test_abstract_classes() -> None:
    for kind in (QuantizedLinear, QuantizationAdapter):
        with pytest.raises(TypeError):
            kind()
    assert QuantizedLinear.__abstractmethods__ == {"forward", "quantize_weights", "dequantize_weights"}
    assert QuantizationAdapter.__abstractmethods__ == {
        "create_quantized_linear",
        "quantize_model",
        "prepare_model_for_training",
        "save_quantized_model",
        "load_quantized_model",
    }
    assert not isinstance(nn.Linear(2, 2), QuantizedLinear)


@pytest.mark.parametrize(("kind", "options", "most_error", "most_bits"), REAL, ids=IDS)
def test_layers_are_really_quantized(kind: Any, options: Any, most_error: float, most_bits: float) -> None:
    adapter = kind(QuantizationConfig(**options))
    layer = adapter.create_quantized_linear(128, 256)
    assert isinstance(layer, QuantizedLinear) and isinstance(layer, nn.Module)
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)) * 0.02
    layer.quantize_weights(weight)
    dense = layer.dequantize_weights(torch.float32)
    assert 0 < relative_error(dense, weight) < most_error
    held = stored_bytes(layer.stored) if isinstance(layer, QuantLinear) else 2 * weight.numel()
    # Two tables of bnb (1,088 bytes) are a matter of small layers only.
    assert (held - 1088 * (options["method"] is M.BNB_NF4)) * 8 / weight.numel() <= most_bits
    x = torch.randn(3, 128, requires_grad=True)
    wanted = nn.functional.linear(x, dense, layer.bias.float())
    assert relative_error(layer(x), wanted) < 1e-5
    with pytest.raises(UserError, match="does not fit"):
        layer.quantize_weights(weight.T)


def test_small_zero_points_and_scales_take_less_room() -> None:
    sizes = []
    for zero, scale in ((False, False), (True, False), (True, True)):
        config = QuantizationConfig(method=M.HQQ, quant_zero=zero, quant_scale=scale)
        sizes.append(stored_bytes(HQQAdapter(config).create_quantized_linear(128, 256).stored))
    assert sizes[0] > sizes[1] > sizes[2]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, None])
def test_compute_dtype(dtype: Any) -> None:
    layer = HQQAdapter(QuantizationConfig(method=M.HQQ, compute_dtype=dtype)).create_quantized_linear(64, 64)
    x = torch.randn(4, 64)
    used = torch.float32 if dtype is None else torch.bfloat16
    wanted = nn.functional.linear(x.to(used), layer.dequantize_weights(used), layer.bias.to(used)).float()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize(("kind", "options"), ADAPTERS, ids=IDS)
def test_lora_trains_through_a_plain_torch_model(kind: Any, options: Any, block: Block) -> None:
    adapter = kind(QuantizationConfig(**options | {"quant_scale": False}))
    model = adapter.prepare_model_for_training(adapter.quantize_model(block))
    assert model is block and not any(parameter.requires_grad for parameter in model.parameters())
    assert type(model.lm_head) is nn.Linear
    assert_lora_trains(model, lambda: model(inputs()).square().mean(), "enter,leave")


@pytest.mark.parametrize(("kind", "options"), ADAPTERS, ids=IDS)
def test_lora_trains_through_a_transformers_model(kind: Any, options: Any, llama: Any) -> None:
    tokens = torch.arange(24).reshape(2, 12) % 100
    adapter = kind(QuantizationConfig(**options | {"quant_scale": False}))
    adapter.prepare_model_for_training(adapter.quantize_model(llama), use_gradient_checkpointing=True)
    assert len(quantized_names(llama)) == (0 if kind is FallbackAdapter else 14)
    assert_lora_trains(llama, lambda: llama(input_ids=tokens, labels=tokens).loss, "all")


def assert_lora_trains(model: Any, loss_of: Any, targets: str) -> None:
    settings = AdapterSettings(rank=4, alpha=8.0, dropout=0.0, rank_stabilized=False, magnitudes=False)
    adapters = add_adapters(model, targets=targets, settings=settings, seed=0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(adapters) > 0
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        for adapter in adapters.values():
            assert adapter.lora_B.grad is not None and float(adapter.lora_B.grad.abs().sum()) > 0
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_gradient_checkpointing_is_refused_where_there_is_none(block: Block) -> None:
    with pytest.raises(UserError, match="recompute"):
        HQQAdapter().prepare_model_for_training(block, use_gradient_checkpointing=True)


@pytest.mark.parametrize(("kind", "options"), ADAPTERS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_models_come_back_bit_for_bit(
    kind: Any, options: Any, dtype: torch.dtype, block: Block, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("method", [M.BNB_NF4, M.HQQ_4BIT, M.QUANTO_INT4, M.NONE])
@pytest.mark.parametrize("is_tied", [False, True])
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
    with pytest.raises(UserError, match="another model"):
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


def test_layers_have_their_own_bits(llama: Any) -> None:
    config = QuantizationConfig(
        method=M.HQQ,
        layer_configs={
            "self_attn": 8,
            "layers.1.self_attn.q_proj": {"bits": 3, "group_size": 32},
            "*.down_proj": {"method": M.BNB_NF4, "quant_type": "fp4"},
            "layers.0.mlp.up_proj": {"bits": 16},
        },
    )
    HQQAdapter(config).quantize_model(llama)
    specs = {
        name.removeprefix("model.layers."): llama.get_submodule(name).recipe.spec
        for name in quantized_names(llama)
    }
    widths = {name: (spec.quantizer, spec.bits, spec.group_size, spec.kind) for name, spec in specs.items()}
    assert widths["0.self_attn.q_proj"] == ("hqq", 8, 64, "auto")
    assert widths["1.self_attn.q_proj"] == ("hqq", 3, 32, "auto")
    assert widths["0.mlp.down_proj"] == ("bnb", 4, 64, "fp4")
    assert widths["1.mlp.up_proj"] == ("hqq", 4, 64, "auto")
    assert "0.mlp.up_proj" not in widths and llama.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert type(llama.lm_head) is nn.Linear and llama.lm_head.weight.dtype == torch.float32


def test_words_that_mean_no_layer(block: Block) -> None:
    with pytest.raises(ValueError, match="no linear layer"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, layer_configs={"mlp": 8})).quantize_model(block)
    with pytest.raises(ValueError, match="skip_modules leaves out"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, layer_configs={"lm_head": 8})).quantize_model(block)
    assert not quantized_names(block)
    with pytest.warns(UserWarning, match="'gate'"):
        HQQAdapter(QuantizationConfig(method=M.HQQ, skip_modules=["gate", "lm_head"])).quantize_model(block)


def test_skipping(block: Block) -> None:
    model = replace_linear_with_quantized(block, QuantoAdapter(), skip_modules=["leave", "lm_head"])
    assert quantized_names(model) == {"enter"}
    with pytest.raises(ValueError, match="No layer"):
        replace_linear_with_quantized(model, QuantoAdapter(), skip_modules=["leave", "lm_head"])


def test_torch_parts_that_read_weights_themselves_still_work() -> None:
    """In evaluation torch's encoder layer hands the weights of its linear layers to one fused kernel."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        before = model(inputs())
        after = HQQAdapter(QuantizationConfig(method=M.HQQ, bits=8)).quantize_model(model)(inputs())
    assert quantized_names(model) == {"linear1", "linear2"}
    assert 0 < relative_error(after, before) < 0.01


def test_a_group_that_does_not_divide_leaves_the_model_alone(block: Block) -> None:
    adapter = QuantoAdapter(QuantizationConfig(method=M.QUANTO_INT4, group_size=96))
    with pytest.raises(UserError, match=r"enter: Groups of 96"):
        adapter.quantize_model(block)
    assert not quantized_names(block)


def test_shared_layers_and_shared_weights() -> None:
    model = nn.ModuleDict(
        {"a": nn.Linear(64, 64), "embedding": nn.Embedding(64, 64), "head": nn.Linear(64, 64)}
    )
    model["b"] = model["a"]
    model["head"].weight = model["embedding"].weight
    with pytest.warns(UserWarning, match="head is not quantized"):
        HQQAdapter().quantize_model(model)
    assert model["a"] is model["b"] and quantized_names(model) == {"a"}


def test_a_quantized_layer_follows_casts_and_refuses_to_lose_its_weights(block: Block) -> None:
    model = HQQAdapter().quantize_model(block).to(torch.bfloat16)
    assert model(inputs().bfloat16()).dtype == torch.bfloat16
    with pytest.raises(UserError, match="meta"):
        model.to("meta")


@pytest.mark.parametrize("method", ["create_quantized_linear", "quantize_model", "prepare_model_for_training",
                                    "save_quantized_model", "load_quantized_model"])  # fmt: skip
def test_mlx_says_where_to_go(method: str) -> None:
    adapter = create_quantization_adapter(
        "mlx", QuantizationConfig(method=M.MLX_INT4), machine=load_machine("apple-m2-max-64gb")
    )
    assert isinstance(adapter, MLXAdapter)
    arguments = {"create_quantized_linear": (8, 8), "save_quantized_model": (None, "x")}.get(method, (None,))
    with pytest.raises(UserError, match="--backend mlx") as caught:
        getattr(adapter, method)(*arguments)
    assert "HQQ" in str(caught.value)


def test_the_guide_on_this_machine(block: Block) -> None:
    """Integration with Quantization, up to the wrapping, which is another module's."""
    quant_config = QuantizationConfig(method=QuantizationMethod.HQQ_4BIT, bits=4, compute_dtype=torch.float16)
    assert quant_config.compute_dtype is torch.float16
    assert validate_quantization_config(quant_config, "cpu") == []
    adapter = create_quantization_adapter("cpu", quant_config, strict=True)
    assert isinstance(adapter, HQQAdapter)
    assert torch.isfinite(adapter.quantize_model(block)(inputs())).all()
    assert isinstance(get_recommended_config("cpu"), QuantizationConfig)
