"""The fast layers with fp8 matmuls: close to the same weights without fp8, and the choice of excluded layer groups."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from fast_models import SHAPE, fast_loss, general_loss, gradients, make_model, quantize_base
from safetensors.torch import save_file
from torch import nn

from crosstune.core.quantization import QuantSpec
from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.calibrate_fp8 import choose_fp8_exclusions, write_text
from crosstune.torch_engine.kernels.choose_layers import describe_decoder
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import Fp8Weights
from crosstune.torch_engine.kernels.operations import Quantize
from crosstune.torch_engine.loading.adapters import Adapted
from crosstune.torch_engine.loading.load import forms_to_quantize
from crosstune.torch_engine.loading.weight_forms import weight_forms
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight

TOLERANCE = 0.005
IN_FP8 = QuantSpec(quantizer="fp8", bits=8, group_size=0)


def cosines(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[float]:
    return [
        F.cosine_similarity(found[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in expected
    ]


def outside_fp8(decoder: FastDecoder) -> list[str]:
    return [name for name, stacked in decoder.groups().items() if not stacked.in_fp8]


@pytest.mark.parametrize(
    "spec",
    [IN_FP8, QuantSpec(quantizer="bnb", bits=4, group_size=64)],
    ids=["stored in fp8", "stored in NF4"],
)
def test_products_in_fp8_are_near_those_of_the_same_weights(spec: QuantSpec) -> None:
    model, adapters = make_model("llama, biases, tied head")
    quantize_base(adapters, spec)
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    assert outside_fp8(decoder) == ["layers.0.down", "layers.2.down"]
    found = fast_loss(decoder, None)
    assert found.item() == pytest.approx(loss.item(), rel=2e-2) and found.item() != loss.item()
    similar = cosines(gradients(found, adapters), expected)
    assert min(similar) > 0.98 and sum(similar) / len(similar) > 0.995
    # Text and merging read the modules, whose bits are views of the stacked ones.
    assert torch.allclose(general_loss(model, None), loss)


def test_an_fp8_product_is_the_product_of_what_was_rounded() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 48), torch.randn(5, 48)
    base = QuantLinear(quantize_weight(weight, IN_FP8, torch.float32), None)
    weights = Fp8Weights([base], dtype=torch.float32)
    rows = torch_operations.quantize_rows(x, Quantize())
    assert rows.packed is not None and rows.scale is not None
    rounded = rows.packed.double() * rows.scale.double()
    dense = base.stored.dequantize(torch.float32).double()
    assert torch.allclose(weights.product(rows).double(), rounded @ dense.T, rtol=1e-4, atol=1e-5)
    gradient = torch.randn(5, 32)
    rows = torch_operations.quantize_rows(gradient, Quantize(weights.row_scales))
    assert rows.packed is not None and rows.scale is not None
    folded = rows.packed.double() * rows.scale.double() / weights.row_scales.double()
    assert torch.allclose(weights.input_gradient(rows).double(), folded @ dense, rtol=1e-4, atol=1e-5)
    assert (weights.input_gradient(rows) - gradient @ weight).norm() / (gradient @ weight).norm() < 0.08


def make_sharp(
    name: str, folder: Path, *, prefix: str = "model."
) -> tuple[nn.Module, dict[str, Adapted], Path]:
    """Make a model whose predictions depend on every layer, and its folder, where names begin with `prefix`."""
    model, adapters = make_model(name, tie_word_embeddings=False)
    model.lm_head.weight.data *= 8
    weights = {
        name.replace(".base.", ".").replace("model.", prefix, 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
        if "lora_" not in name
    }
    save_file(weights, folder / "model.safetensors")
    return model, adapters, folder


@pytest.fixture
def sharp_model(tmp_path: Path) -> tuple[nn.Module, dict[str, Adapted], Path]:
    return make_sharp("llama", tmp_path)


def test_a_model_whose_predictions_stay_near_keeps_all_groups_in_fp8() -> None:
    model, adapters = make_model("llama")
    quantize_base(adapters, IN_FP8)
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    outside = outside_fp8(decoder)
    found = choose_fp8_exclusions(decoder, folder=None, tolerance=TOLERANCE, seed=0)
    assert found.names == () and 0 < found.before == found.after < TOLERANCE
    assert outside_fp8(decoder) == outside and describe_decoder(decoder, refused=None, left_out=found) == []


def test_groups_leave_fp8_until_predictions_are_near_those_of_the_folder(sharp_model: Any) -> None:
    model, adapters, folder = sharp_model
    exact = FastDecoder(copy.deepcopy(model), dtype=torch.float32)
    quantize_base(adapters, IN_FP8)
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    in_fp8 = {name for name, stacked in decoder.groups().items() if stacked.in_fp8}
    assert choose_fp8_exclusions(decoder, folder=folder, tolerance=0, seed=0).names == ()
    found = choose_fp8_exclusions(decoder, folder=folder, tolerance=TOLERANCE, seed=0)
    assert found.names and found.before > TOLERANCE >= found.after
    assert {*outside_fp8(decoder)} == (decoder.groups().keys() - in_fp8) | {*found.names}
    # Measured again on other text, by the two decoders themselves.
    ids = write_text(exact, seed=1)
    with torch.no_grad():
        predictions = [one.logits(one.hidden(ids)).log_softmax(-1) for one in (exact, decoder)]
    exactly, nearly = predictions
    divergence = (exactly.exp() * (exactly - nearly)).sum(-1).mean()
    assert 0 < divergence < 2 * TOLERANCE
    name = found.names[0]
    bases, originals = decoder.groups()[name].bases, exact.groups()[name].bases
    assert all(
        torch.equal(base.weight, original.weight) for base, original in zip(bases, originals, strict=True)
    )
    # The modules that text and merging read are the same ones.
    assert general_loss(model, None).item() == pytest.approx(fast_loss(decoder, None).item(), rel=2e-2)
    [sentence] = describe_decoder(decoder, refused=None, left_out=found)
    assert (
        sentence.startswith(f"base_precision: {len(found.names)} of {len(in_fp8)} layer groups")
        and name in sentence
    )


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("llama", ""),
        ("llama, biases, tied head", "model."),
        ("qwen3, QK norms", "model."),
        ("gemma3", "model."),
        ("phi3, half of each head rotated", "model."),
    ],
)
def test_groups_of_every_family_leave_fp8(name: str, prefix: str, tmp_path: Path) -> None:
    model, adapters, folder = make_sharp(name, tmp_path, prefix=prefix)
    quantize_base(
        {name: adapter for name, adapter in adapters.items() if not name.endswith("down_proj")}, IN_FP8
    )
    before = general_loss(model, None).item()
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    assert choose_fp8_exclusions(decoder, folder=folder, tolerance=1e-9, seed=0).names
    assert not any(isinstance(module, QuantLinear) for module in model.modules())
    exact = general_loss(model, None).item()
    assert exact != before and fast_loss(decoder, None).item() == pytest.approx(exact, rel=1e-5)


def test_a_model_without_numbers_for_predictions_leaves_fp8_as_it_is(sharp_model: Any) -> None:
    model, adapters, folder = sharp_model
    quantize_base(adapters, IN_FP8)
    model.lm_head.weight.data[3, 3] = torch.nan
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    assert choose_fp8_exclusions(decoder, folder=folder, tolerance=TOLERANCE, seed=0).names == ()


def test_without_original_weights_groups_multiply_densely_with_the_stored_ones(sharp_model: Any) -> None:
    model, adapters, _ = sharp_model
    quantize_base(adapters, QuantSpec(quantizer="bnb", bits=4, group_size=64))
    before = general_loss(model, None)
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    found = choose_fp8_exclusions(decoder, folder=None, tolerance=TOLERANCE, seed=0)
    assert found.names and isinstance(decoder.groups()[found.names[0]].bases[0], QuantLinear)
    assert torch.equal(general_loss(model, None), before)
    assert fast_loss(decoder, None).item() == pytest.approx(before.item(), rel=2e-2)


@pytest.mark.parametrize("num_layers", [1, 4])
def test_the_output_of_the_first_and_of_the_last_mlp_is_not_in_fp8(num_layers: int) -> None:
    """Neither stored nor multiplied, which are chosen apart. In a model of one block they are the same."""
    plain = hf.LlamaForCausalLM(hf.LlamaConfig(**SHAPE | {"num_hidden_layers": num_layers}))
    outer = {0, num_layers - 1}
    left_out = weight_forms(plain).keys() - forms_to_quantize(plain, IN_FP8).keys()
    assert left_out == {f"model.layers.{index}.mlp.down_proj.weight" for index in outer}
    model, adapters = make_model("llama", num_hidden_layers=num_layers)
    quantize_base(adapters, IN_FP8)
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    assert {*outside_fp8(decoder)} == {f"layers.{index}.down" for index in outer}
