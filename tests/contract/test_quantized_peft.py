"""PEFT's adapters on models quantized by the guides' quantization_wrapper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from quantization_cases import M, torch
from transformers import AutoModelForCausalLM

from crosstune.core.errors import UserError
from quantization_wrapper import (
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    QuantizationConfig,
    QuantoAdapter,
)

peft = pytest.importorskip("peft", reason="comes with the torch extra")

CASES = [
    (BitsAndBytesAdapter, {"method": M.BNB_NF4}, False),
    (BitsAndBytesAdapter, {"method": M.BNB_INT8}, True),
    (HQQAdapter, {"method": M.HQQ_4BIT}, True),
    (QuantoAdapter, {"method": M.QUANTO_INT4}, False),
    (FallbackAdapter, {"method": M.NONE}, False),
]
TOKENS = torch.arange(24).reshape(2, 12) % 100


def quantized(tiny_model: Path, kind: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    adapter = kind(QuantizationConfig(**options))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    return adapter, adapter.prepare_model_for_training(adapter.quantize_model(model))


def with_lora(model: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))


@pytest.mark.parametrize(("kind", "options", "use_dora"), CASES)
def test_peft_trains_over_a_quantized_model(
    tiny_model: Path, kind: Any, options: dict[str, Any], use_dora: bool
) -> None:
    _, base = quantized(tiny_model, kind, options)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = with_lora(base, use_dora=use_dora)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        optimizer.zero_grad()
        loss.backward()
        assert {name for name, p in model.named_parameters() if p.grad is not None} == set(trained)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = {
        name.replace(".base_layer", ""): t for name, t in base.state_dict().items() if "lora_" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


@pytest.mark.parametrize("use_dora", [False, True])
def test_an_adapter_saved_by_peft_goes_back_onto_a_loaded_folder(
    tiny_model: Path, tmp_path: Path, use_dora: bool
) -> None:
    adapter, base = quantized(tiny_model, HQQAdapter, {"method": M.HQQ_4BIT})
    adapter.save_quantized_model(base, tmp_path / "base")
    model = with_lora(base, init_lora_weights=False, use_dora=use_dora).eval()
    model.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        adapter.load_quantized_model(tmp_path / "base"), tmp_path / "adapter"
    )
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=TOKENS).logits, model(input_ids=TOKENS).logits)


@pytest.mark.parametrize("safe", [False, True])
def test_merging_into_packed_bits_is_refused_instead_of_lost(tiny_model: Path, safe: bool) -> None:
    adapter, base = quantized(tiny_model, BitsAndBytesAdapter, {"method": M.BNB_NF4})
    model = with_lora(base, init_lora_weights=False)
    with pytest.raises(UserError, match="cannot be changed in place") as caught:
        model.merge_and_unload(safe_merge=safe)
    assert "crosstune merge" in str(caught.value)
    with pytest.raises(UserError, match="has an adapter"):
        adapter.save_quantized_model(model, Path("never"))


def test_the_dense_view_reads_like_a_tensor_and_refuses_changes() -> None:
    layer = QuantoAdapter(QuantizationConfig(method=M.QUANTO_INT8)).create_quantized_linear(64, 32)
    weight = layer.weight
    assert isinstance(layer, torch.nn.Linear) and weight.shape == (32, 64)
    assert torch.equal(weight, layer.dequantize_weights()) and type(weight * 2) is torch.Tensor
    assert torch.equal(
        torch.nn.functional.linear(torch.ones(1, 64), weight),
        torch.ones(1, 64) @ layer.dequantize_weights().T,
    )
    for change in (
        lambda w: w.add_(1),
        lambda w: w.__iadd__(1),
        lambda w: w.__setitem__(0, 1),
        lambda w: w.copy_(w),
    ):
        with pytest.raises(UserError, match="cannot be changed in place"):
            change(layer.weight)
