"""Experts of a mixture and GPT-2's layers: chosen, quantized, converted and merged."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import short_batches, tiny_of, train_step
from transformers import AutoModelForCausalLM

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.data.batches.token_batch import IGNORED, TokenBatch
from crosstune.loop.step import prepare_window
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.experts import AdaptedStack, QuantStack, experts_forward
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.quantized import quantize_weight
from crosstune.torch_engine.session.session import TorchSession

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
EXPERTS = {"gate_up_proj", "down_proj"}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def make(family: str) -> Path:
        vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
        folder = tiny_of(family, tmp_path_factory.mktemp("models") / family, vocab)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_model / name, folder / name)
        return folder

    return make


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    return short_batches(tiny_model)[:1]


def open_session(model: Path, **options: Any) -> TorchSession:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(model), "lora_rank": 4} | options
    return open_torch(make_plan(make_config(**asked)), model_folder=model)


def logits(model: Any, window: list[TokenBatch]) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.from_numpy(window[0].input_ids).long()).logits


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("all", ATTENTION | EXPERTS),
        ("attention", ATTENTION),
        ("q_proj,down_proj", {"q_proj", "down_proj"}),
        (r".*\.1\.mlp\..*", EXPERTS),
    ],
)
def test_experts_are_chosen_as_layers_are(make_model: Make, targets: str, expected: set[str]) -> None:
    session = open_session(make_model("mixtral"), lora_target_modules=targets)
    assert {name.rpartition(".")[2] for name in session.adapters} == expected
    assert not any("mlp.gate." in name for name in session.masters.masters), "the router is not trained"


def test_experts_of_one_layer_only(make_model: Make, window: list[TokenBatch], tmp_path: Path) -> None:
    """The names in PEFT's settings match these layers only."""
    from peft import AutoPeftModelForCausalLM

    folder = make_model("qwen3_moe")
    session = open_session(folder, lora_target_modules=r".*\.1\.mlp\.experts\.down_proj")
    train_step(session, window, lr=1e-2)
    assert list(session.adapters) == ["model.layers.1.mlp.experts.down_proj"]
    loaded = AutoPeftModelForCausalLM.from_pretrained(session.save_result(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(logits(loaded, window), logits(session.model, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_balance_loss_and_trained_routers_equal_transformers(
    make_model: Make, window: list[TokenBatch], tmp_path: Path, family: str
) -> None:
    """Over padded rows; the saved routers open in PEFT."""
    from peft import AutoPeftModelForCausalLM

    folder = make_model(family)
    session = open_session(folder, router_aux_loss_coef=0.5, train_router=True, apply_gradient_clipping=False)
    found = session.backward(prepare_window(session, window))
    routers = [name for name in session.masters.masters if ".adapter." not in name and "lora" not in name]
    gradients = {name: session.model.get_parameter(name).grad.clone() for name in routers}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    [batch] = window
    assert batch.has_padding
    ids, targets = (torch.from_numpy(array).long() for array in (batch.input_ids, batch.targets))
    mask = torch.from_numpy(batch.segments > 0).long()
    output = model(input_ids=ids, attention_mask=mask, output_router_logits=True)
    entropy = torch.nn.functional.cross_entropy(
        output.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED
    )
    loss = entropy + 0.5 * output.aux_loss
    assert found.loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.metrics["router_balance"] == pytest.approx(output.aux_loss.item(), rel=1e-5)
    loss.backward()
    assert len(routers) == (2 if family == "mixtral" else 4)
    for name, gradient in gradients.items():
        expected = model.get_parameter(name).grad
        assert (gradient - expected).norm() <= 1e-5 * expected.norm()
    train_step(session, window, lr=1e-2)
    loaded = AutoPeftModelForCausalLM.from_pretrained(session.save_result(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(logits(loaded, window), logits(session.model, window), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"train_router": True}, {"router_aux_loss_coef": 0.1}])
def test_router_options_need_a_mixture(make_model: Make, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"mixture of experts|no balance loss"):
        open_session(make_model("llama"), **options)


def test_dora_leaves_experts_out_and_refuses_them_by_name(make_model: Make) -> None:
    folder = make_model("mixtral")
    session = open_session(folder, train_type="dora")
    assert {name.rpartition(".")[2] for name in session.adapters} == ATTENTION
    with pytest.raises(UserError, match="dora cannot adapt"):
        open_session(folder, train_type="dora", lora_target_modules="down_proj")


@pytest.mark.parametrize(("quantizer", "bits", "checkpointing"), [("bnb", 4, True), ("hqq", 4, False)])
def test_quantized_experts_learn_and_are_merged_as_trained(
    make_model: Make, window: list[TokenBatch], tmp_path: Path, quantizer: str, bits: int, checkpointing: bool
) -> None:
    folder = make_model("mixtral")
    session = open_session(
        folder,
        train_type="qlora",
        quantization_backend=quantizer,
        n_bits=bits,
        use_gradient_checkpointing=checkpointing,
    )
    stacks = [module for module in session.model.modules() if isinstance(module, AdaptedStack)]
    assert len(stacks) == 4
    assert all(isinstance(stack.base, QuantStack) for stack in stacks)
    losses = [train_step(session, window, lr=1e-2).loss for _ in range(3)]
    assert losses[-1] < losses[0]
    adapter = session.save_result(tmp_path)
    out = tmp_path / "merged"
    words = [str(adapter), "--base", str(folder), "--into", "dequantized", "--out", str(out)]
    assert main(["merge", *words]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits(merged, window), logits(session.model, window), rtol=1e-4, atol=1e-5)


def test_a_converted_folder_trains_like_one_quantized_on_load_and_converts_back(
    make_model: Make, window: list[TokenBatch], tmp_path: Path
) -> None:
    folder = make_model("gpt_oss")
    words = f"{folder} --to bnb --dtype fp32 --out {tmp_path / 'small'}"
    assert main(["convert", *words.split()]) == 0
    options = {"train_type": "qlora", "quantization_backend": "bnb"}
    sessions = [open_session(path, **options) for path in (folder, tmp_path / "small")]
    losses = [[train_step(session, window, lr=1e-2).loss for _ in range(3)] for session in sessions]
    assert losses[0] == losses[1]
    words = f"{tmp_path / 'small'} --to none --original none --out {tmp_path / 'back'}"
    assert main(["convert", *words.split()]) == 0
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    bare = open_session(folder, **options)
    torch.testing.assert_close(logits(back, window), logits(bare.model, window), rtol=1e-4, atol=1e-5)


def test_files_without_the_prefix_of_the_model_are_quantized(
    make_model: Make, window: list[TokenBatch], tmp_path: Path
) -> None:
    """GPT-2's own files have no prefix, and hold masks that models ignore."""
    folder = make_model("gpt2")
    bare = shutil.copytree(folder, tmp_path / "bare")
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 256, 256).tril() for n in range(2)}
    save_file(renamed | masks, bare / "model.safetensors", metadata={"format": "pt"})
    losses = []
    for path in (folder, bare):
        session = open_session(path, train_type="qlora")
        losses.append([train_step(session, window, lr=1e-2).loss for _ in range(3)])
    assert losses[0] == losses[1]
    adapter = session.save_result(tmp_path)
    out = tmp_path / "merged"
    assert main(["merge", str(adapter), "--base", str(bare), "--into", "dequantized", "--out", str(out)]) == 0
    assert load_file(out / "model.safetensors").keys() == (renamed | masks).keys()
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    torch.testing.assert_close(logits(merged, window), logits(session.model, window), rtol=1e-4, atol=1e-5)


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply group by group: torch's grouped products do not support float64."""
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_: False)


@pytest.mark.parametrize("family", ["glm4_moe", "gpt_oss", "nemotron_h"])
def test_experts_and_their_gradients_equal_transformers(
    make_model: Make, family: str, in_float64: None
) -> None:
    """In float64, with a base and biases that are trained: every gradient that can be wanted."""
    model = AutoModelForCausalLM.from_pretrained(make_model(family), dtype=torch.float64)
    module = next(m for m in model.modules() if hasattr(m, "down_proj") and hasattr(m, "_apply_gate"))
    torch.manual_seed(0)
    hidden = torch.randn(9, module.down_proj.shape[1 if not module.is_transposed else 2]).double()
    index = torch.stack([torch.randperm(3)[:2] for _ in range(9)])  # the last expert has no rows
    weights = torch.rand(9, 2).double()
    found = []
    for forward in (type(module).forward, experts_forward):
        given = [tensor.clone().requires_grad_() for tensor in (hidden, weights)]
        out = forward(module, given[0], index, given[1])
        found.append([out, *torch.autograd.grad(out.square().sum(), [*given, *module.parameters()])])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_gradients_pass_through_dropout_of_experts_adapters(make_model: Make, in_float64: None) -> None:
    session = open_session(make_model("gpt_oss"), lora_dropout=0.3)
    module = session.model.get_submodule("model.layers.0.mlp.experts").double()
    for stack in (module.gate_up_proj, module.down_proj):
        torch.nn.init.normal_(stack.lora_B, std=0.3)

    def forward(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return experts_forward(module, hidden, torch.tensor([[0, 1], [3, 1]]), weights)

    given = (torch.randn(2, 64).double().requires_grad_(), torch.rand(2, 2).double().requires_grad_())
    assert torch.autograd.gradcheck(forward, given)


def test_a_part_of_a_stack_is_dequantized_as_one_by_one() -> None:
    """Also matrices that blocks of 64 do not divide."""
    spec = QuantSpec(quantizer="bnb", bits=4, group_size=64)
    for shape in ((48, 32), (7, 9)):
        torch.manual_seed(0)
        stored = [quantize_weight(torch.randn(shape), spec, torch.float32) for _ in range(5)]
        stack = QuantStack(stored)
        dense = stack.dense(slice(1, 4), torch.float32)
        assert torch.equal(dense, torch.stack([weight.dequantize(torch.float32) for weight in stored[1:4]]))
    stored[2].facts = {**stored[2].facts, "quant_type": "fp4"}
    with pytest.raises(UserError, match="quantized differently"):
        QuantStack(stored)
