"""Methods and quantizers on real, tiny models of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import STORED_FORMS, tiny_of, train_step
from transformers import AutoModelForCausalLM

from crosstune.config.load import make_config
from crosstune.core.errors import UserError
from crosstune.core.quantization import QuantSpec
from crosstune.data.batches.token_batch import TokenBatch, pad_rows
from crosstune.data.render.rendering import encode_conversation
from crosstune.data.tokens.tokenizer import Tokenizer
from crosstune.planner.gather import make_plan
from crosstune.torch_engine.loading.blocks import expand_evenly
from crosstune.torch_engine.open import open_session as open_torch
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight
from crosstune.torch_engine.session.session import TorchSession

TURNS = [
    [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": f"{word} it is, " * n}]
    for n, word in enumerate(["red", "green", "blue", "a much longer colour"], start=1)
]


def open_session(model: Path, **options: Any) -> TorchSession:
    asked = {"backend": "cpu", "precision": "fp32", "model_name": str(model)} | options
    return open_torch(make_plan(make_config(**asked)), model_folder=model)


@pytest.fixture(scope="module")
def window(tiny_model: Path) -> list[TokenBatch]:
    tokenizer = Tokenizer.from_folder(tiny_model)
    examples = [encode_conversation(turns, tokenizer, index=i, whole=False) for i, turns in enumerate(TURNS)]
    return [pad_rows(examples, pad_id=0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("quantizer", "bits", "kind"), STORED_FORMS)
def test_a_quantized_layer_is_the_layer_of_its_own_dense_weight(
    quantizer: str, bits: int, kind: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(96, 128, generator=generator) * 0.02
    bias = torch.randn(96, generator=generator)
    spec = QuantSpec(quantizer=quantizer, bits=bits, group_size=64, kind=kind)
    stored = quantize_weight(weight.to(dtype), spec, dtype)
    dense = stored.dequantize(dtype)
    assert dense.shape == weight.shape
    assert sum(t.nbytes for t in stored.tensors().values()) * 8 / weight.numel() < bits + 1.8
    x = torch.randn(7, 128, generator=generator).to(dtype).requires_grad_()
    reference = x.detach().clone().requires_grad_()
    out = QuantLinear(stored, bias)(x)
    expected = torch.nn.functional.linear(reference, dense, bias.to(dtype))
    out.float().square().sum().backward()
    expected.float().square().sum().backward()
    for result, wanted in ((out, expected), (x.grad, reference.grad)):
        assert (result - wanted).norm() <= 8 * torch.finfo(dtype).eps * wanted.norm()
    if bits >= 4:
        assert (dense.float() - weight).norm() / weight.norm() < {8: 0.03, 4: 0.15}[bits]


@pytest.mark.parametrize(
    ("quantizer", "bits", "precision"),
    [
        ("bnb", 8, "bf16"),
        ("hqq", 4, "bf16_autocast"),
        ("quanto", 4, "fp32"),
        ("quanto", 8, "fp32"),
        ("bnb", 4, "bf16"),
    ],
)
def test_adapters_learn_over_every_quantized_base(
    tiny_model: Path, window: list[TokenBatch], quantizer: str, bits: int, precision: str
) -> None:
    session = open_session(
        tiny_model, train_type="qlora", quantization_backend=quantizer, n_bits=bits, precision=precision
    )
    frozen = [module for module in session.model.modules() if isinstance(module, QuantLinear)]
    assert len(frozen) == 14
    losses = [train_step(session, window, lr=5e-3).loss for _ in range(8)]
    assert losses[-1] < 0.95 * losses[0]
    assert session.num_parameters() == open_session(tiny_model).num_parameters()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization_backend": "hqq", "group_size": 100}, "does not divide"),
        ({"quantization_backend": "quanto", "group_size": 48}, "does not divide"),
        ({"quantization_backend": "bnb", "group_size": 48}, "does not support block size 48"),
        ({"quantization_backend": "bnb", "quant_type": "float8"}, "does not support --quant_type float8"),
        ({"quantization_backend": "hqq", "n_bits": 5}, "5-bit"),
    ],
)
def test_what_a_quantizer_cannot_do_is_said(tiny_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_session(tiny_model, train_type="qlora", **options)


def test_new_blocks_change_nothing_at_first_and_alone_are_trained(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path
) -> None:
    session = open_session(tiny_model, train_type="llama_pro", num_new_blocks=2)
    base = open_session(tiny_model)
    assert session.evaluate(window).loss == pytest.approx(base.evaluate(window).loss, rel=1e-5)
    before = {name: tensor.clone() for name, tensor in session.model.state_dict().items()}
    losses = [train_step(session, window, lr=3e-3).loss for _ in range(8)]
    assert losses[-1] < 0.97 * losses[0]
    for name, tensor in session.model.state_dict().items():
        is_new = ".layers.1." in name or ".layers.3." in name
        assert torch.equal(tensor, before[name]) != is_new, name
    folder = session.save_result(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(window[0].input_ids).long()
    with torch.no_grad():
        session.model.eval()
        torch.testing.assert_close(loaded(ids).logits, session.model(ids).logits, rtol=1e-4, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 4


def test_new_blocks_over_a_quantized_base(tiny_model: Path, window: list[TokenBatch], tmp_path: Path) -> None:
    session = open_session(tiny_model, train_type="bnb_llama_pro", num_new_blocks=1)
    kinds = {name: type(module) for name, module in session.model.named_modules() if name.endswith("q_proj")}
    assert [kind is QuantLinear for kind in kinds.values()] == [True, True, False]
    losses = [train_step(session, window, lr=3e-3).loss for _ in range(8)]
    assert losses[-1] < 0.97 * losses[0]
    saved = session.save_result(tmp_path)
    record = json.loads((saved / "crosstune.json").read_text())
    assert (record["quantization"]["quantizer"], record["new_blocks"]) == ("bnb", [2])
    loaded = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    torch.testing.assert_close(
        loaded.model.layers[0].mlp.up_proj.weight, original.model.layers[0].mlp.up_proj.weight, rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("family", "train_type"),
    [("mamba", "llama_pro"), ("phi", "llama_pro"), ("opt", "bnb_llama_pro"), ("starcoder2", "bnb_llama_pro")],
)
def test_new_blocks_change_nothing_at_first_in_families_with_biases(
    tiny_model: Path, tmp_path: Path, window: list[TokenBatch], family: str, train_type: str
) -> None:
    folder = tiny_of(family, tmp_path / family, vocabulary(tiny_model))
    session = open_session(folder, train_type=train_type, num_new_blocks=2)
    base = open_session(folder, train_type="lora" if train_type == "llama_pro" else "qlora")
    assert session.evaluate(window).loss == pytest.approx(base.evaluate(window).loss, rel=1e-5)
    losses = [train_step(session, window, lr=3e-3).loss for _ in range(2)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["opt_post_norm", "gpt2"])
def test_blocks_that_would_change_the_model_are_refused(
    tiny_model: Path, tmp_path: Path, family: str
) -> None:
    folder = tiny_of(family, tmp_path / family, vocabulary(tiny_model))
    with pytest.raises(UserError, match="llama_pro cannot add blocks"):
        open_session(folder, train_type="llama_pro")


def test_a_model_that_was_expanded_before_is_not_expanded_again(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path
) -> None:
    first = open_session(tiny_model, train_type="llama_pro", num_new_blocks=2)
    losses = [train_step(first, window, lr=3e-3).loss for _ in range(2)]
    expanded = first.save_result(tmp_path).rename(tmp_path / "tiny_blk_exp-2-4")
    plan = make_plan(
        make_config(
            model_name=str(tiny_model),
            train_type="llama_pro",
            llama_pro_path=str(expanded),
            backend="cpu",
            precision="fp32",
        )
    )
    assert plan.config.model_name == str(expanded)
    second = open_torch(plan, model_folder=expanded)
    assert train_step(second, window, lr=3e-3).loss < losses[-1]
    assert second.num_parameters() == first.num_parameters()
    with pytest.raises(UserError, match="does not specify the new blocks"):
        open_session(tiny_model, train_type="llama_pro", llama_pro_path=str(tiny_model))


def test_adapters_are_only_on_layers_that_the_model_calls(
    tiny_model: Path, tmp_path: Path, window: list[TokenBatch]
) -> None:
    """Mamba's mixer reads the weights of its other layers itself and would never call an adapter there."""
    folder = tiny_of("mamba", tmp_path / "mamba", vocabulary(tiny_model))
    session = open_session(folder, train_type="qlora")
    assert {name.rpartition(".")[2] for name in session.adapters} == {"in_proj"}
    losses = [train_step(session, window, lr=1e-2).loss for _ in range(2)]
    assert losses[-1] < losses[0]


def vocabulary(tiny_model: Path) -> int:
    return int(json.loads((tiny_model / "config.json").read_text())["vocab_size"])


def test_blocks_that_cannot_be_spread_evenly_are_refused() -> None:
    assert expand_evenly(4, 2).sources == (0, 1, 1, 2, 3, 3)
    assert expand_evenly(4, 2).new == {2, 5}
    with pytest.raises(UserError, match="1, 2, 4"):
        expand_evenly(4, 3)


FAMILIES = ["qwen2", "qwen3", "gemma2", "phi3", "phi", "gpt2", "gpt_neox", "qwen2_moe"]
LAYOUTS = ["phi3", "gpt2", "gpt_neox", "qwen2_moe"]
"""Families whose files or layers differ from Llama's."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains_and_its_adapter_loads_in_peft(
    tiny_model: Path, tmp_path: Path, window: list[TokenBatch], family: str
) -> None:
    folder = tiny_of(family, tmp_path / family, vocabulary(tiny_model))
    session = open_session(folder, train_type="lora", lora_rank=4)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    labels = torch.full_like(torch.from_numpy(window[0].input_ids).long(), -100)
    labels[:, 1:] = torch.from_numpy(window[0].targets[:, :-1])
    mask = torch.from_numpy((window[0].segments > 0).astype("int64"))
    ids = torch.from_numpy(window[0].input_ids).long()
    expected = reference(input_ids=ids, attention_mask=mask, labels=labels).loss.item()
    assert session.evaluate(window).loss == pytest.approx(expected, rel=1e-5)
    losses = [train_step(session, window, lr=1e-2).loss for _ in range(3)]
    assert losses[-1] < losses[0]
    check_in_peft(session, ids, tmp_path)


def check_in_peft(session: TorchSession, ids: torch.Tensor, folder: Path) -> None:
    """PEFT loads the result and computes the same logits."""
    from peft import AutoPeftModelForCausalLM

    result = session.save_result(folder)
    loaded = AutoPeftModelForCausalLM.from_pretrained(result, dtype=torch.float32).eval()
    session.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, session.model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", LAYOUTS)
def test_every_layout_streams_into_four_bits(
    tiny_model: Path, tmp_path: Path, window: list[TokenBatch], family: str
) -> None:
    folder = tiny_of(family, tmp_path / family, vocabulary(tiny_model))
    session = open_session(folder, train_type="bnb_dora", lora_rank=4)
    assert sum(isinstance(module, QuantLinear) for module in session.model.modules()) >= 8
    losses = [train_step(session, window, lr=1e-2).loss for _ in range(3)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "optimizer",
    [
        *("adamw", "fused_adamw", "adamw_8bit", "adam", "fused_adam"),
        *("lion", "lion_8bit", "sgd", "adadelta", "adafactor"),
    ],
)
def test_every_optimizer_lowers_the_loss(tiny_model: Path, window: list[TokenBatch], optimizer: str) -> None:
    session = open_session(tiny_model, optimizer=optimizer)
    rate = {"sgd": 1.0, "adadelta": 10.0, "lion": 1e-3, "lion_8bit": 1e-3}.get(optimizer, 5e-3)
    losses = [train_step(session, window, lr=rate).loss for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0]


def test_lora_plus_moves_b_faster(tiny_model: Path, window: list[TokenBatch]) -> None:
    plain, faster = (open_session(tiny_model, loraplus_lr_ratio=ratio) for ratio in (1, 16))
    for session in (plain, faster):
        train_step(session, window, lr=1e-4)
    name = next(iter(plain.adapters))
    assert torch.equal(plain.adapters[name].lora_A, faster.adapters[name].lora_A)
    torch.testing.assert_close(
        faster.adapters[name].lora_B, 16 * plain.adapters[name].lora_B, rtol=1e-4, atol=1e-9
    )


def test_rank_stabilized_adapters_load_in_peft(
    tiny_model: Path, window: list[TokenBatch], tmp_path: Path
) -> None:
    session = open_session(tiny_model, use_rslora=True, lora_rank=16, lora_alpha=8)
    train_step(session, window, lr=1e-2)
    check_in_peft(session, torch.from_numpy(window[0].input_ids).long(), tmp_path)


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("quantizer", "bits"), [("bnb", 4), ("bnb", 8), ("hqq", 4), ("quanto", 4), ("quanto", 8)]
)
@pytest.mark.parametrize("train_type", ["qlora", "dora"])
def test_quantized_bases_follow_the_cpu_on_cuda(
    tiny_model: Path, window: list[TokenBatch], train_type: str, quantizer: str, bits: int
) -> None:
    pytest.importorskip({"bnb": "bitsandbytes", "hqq": "hqq", "quanto": "optimum.quanto"}[quantizer])
    options = {"train_type": train_type, "quantization_backend": quantizer, "n_bits": bits}
    here, there = (open_session(tiny_model, backend=backend, **options) for backend in ("cpu", "cuda"))
    for _ in range(5):
        expected = train_step(here, window, lr=1e-3).loss
        assert train_step(there, window, lr=1e-3).loss == pytest.approx(expected, rel=5e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", ["adamw", "fused_adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor"])
def test_optimizers_lower_the_loss_on_cuda(
    tiny_model: Path, window: list[TokenBatch], optimizer: str
) -> None:
    if optimizer.endswith("8bit"):
        pytest.importorskip("bitsandbytes")
    session = open_session(tiny_model, optimizer=optimizer, backend="cuda")
    losses = [train_step(session, window, lr=5e-3).loss for _ in range(8)]
    assert losses[-1] < 0.99 * losses[0]
    assert session.plan.config.optimizer == optimizer


@pytest.mark.cuda
def test_packed_rows_have_the_loss_of_single_ones_on_cuda(tiny_model: Path) -> None:
    from crosstune.data.batches.token_batch import pack_rows

    tokenizer = Tokenizer.from_folder(tiny_model)
    examples = [encode_conversation(turns, tokenizer, index=i, whole=False) for i, turns in enumerate(TURNS)]
    session = open_session(tiny_model, backend="cuda")
    packed = session.evaluate([pack_rows([examples[:2], examples[2:]], pad_id=0)])
    alone = session.evaluate([pad_rows([example], pad_id=0) for example in examples])
    assert packed.weight == alone.weight
    assert packed.loss == pytest.approx(alone.loss, rel=1e-5)
