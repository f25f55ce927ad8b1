"""The fast layers against transformers' own, in fp32: losses and the gradient of every adapter, for each family."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf

from crosstune.core.fast_memory import activation_bytes, fast_layer
from crosstune.core.quantization import QuantSpec
from crosstune.core.training_step import Step
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.folder import config_shape
from crosstune.torch_engine.adapters import Adapted, add_adapters
from crosstune.torch_engine.kernels import decoder as decoder_module
from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.attention import Documents, attend
from crosstune.torch_engine.kernels.calibrate import leave_out_of_fp8
from crosstune.torch_engine.kernels.choose import describe_decoder
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.find_parts import why_general, why_other_adapters
from crosstune.torch_engine.kernels.fp8_weights import Fp8Weights
from crosstune.torch_engine.kernels.operations import Quantize
from crosstune.torch_engine.kernels.recomputation import describe_layer
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight

VOCABULARY = 97
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.08,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**_SHAPE),
    "llama, biases, tied head": lambda: hf.LlamaConfig(
        **_SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama, one head per key": lambda: hf.LlamaConfig(**_SHAPE | {"num_key_value_heads": 4}),
    "mistral, window": lambda: hf.MistralConfig(**_SHAPE, sliding_window=8),
    "qwen2, windows in some layers": lambda: hf.Qwen2Config(
        **_SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1
    ),
    "qwen3, QK norms": lambda: hf.Qwen3Config(**_SHAPE, head_dim=24),
    "gemma": lambda: hf.GemmaConfig(**_SHAPE, head_dim=24),
    "gemma2 without caps": lambda: hf.Gemma2Config(
        **_SHAPE,
        head_dim=24,
        sliding_window=8,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        attn_implementation="eager",
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_SHAPE,
        head_dim=24,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3, half of each head rotated": lambda: hf.Phi3Config(
        **_SHAPE, partial_rotary_factor=0.5, sliding_window=8
    ),
}
PACKED = torch.cat([torch.arange(7), torch.arange(13)]).repeat(2, 1)


def settings(rank: int = 8, *, dropout: float = 0.0, dora: bool = False) -> AdapterSettings:
    return AdapterSettings(rank=rank, alpha=16, dropout=dropout, rank_stabilized=False, magnitudes=dora)


def make_model(name: str, *, rank: int = 8, targets: str = "all") -> tuple[Any, dict[str, Adapted]]:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]())
    for part, parameter in model.named_parameters():
        if "norm" in part or part.endswith("bias"):
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    adapters = add_adapters(model, targets=targets, settings=settings(rank), seed=0)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.1)
    return model, adapters


@lru_cache(maxsize=1)
def make_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, and the indices and targets of the supervised tokens: those of the second half of each row."""
    torch.manual_seed(1)
    rows = torch.cat([torch.arange(10, 20), torch.arange(28, 40)])
    return torch.randint(3, VOCABULARY, (2, 20)), rows, torch.randint(0, VOCABULARY, (len(rows),))


def general_loss(model: Any, positions: torch.Tensor | None) -> torch.Tensor:
    ids, rows, targets = make_rows()
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1)[rows], targets, reduction="sum")


def fast_loss(decoder: FastDecoder, positions: torch.Tensor | None) -> torch.Tensor:
    ids, rows, targets = make_rows()
    return decoder.loss(decoder.hidden(ids, positions=positions, rows=rows), targets)


def gradients(loss: torch.Tensor, adapters: dict[str, Adapted]) -> dict[str, torch.Tensor]:
    for adapter in adapters.values():
        adapter.zero_grad()
    loss.backward()
    return {
        f"{name}.{part}": parameter.grad.clone()
        for name, adapter in adapters.items()
        for part, parameter in adapter.trained().items()
        if parameter.grad is not None
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and expected
    for name, gradient in expected.items():
        distance = (found[name] - gradient).norm() / gradient.norm()
        assert distance < 1e-5, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "packed rows"])
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_general_layers(name: str, packed: bool) -> None:
    model, adapters = make_model(name)
    positions = PACKED if packed else None
    loss = general_loss(model, positions)
    expected = gradients(loss, adapters)
    assert why_general(model) is None and why_other_adapters(adapters) is None
    for recompute in ("none", "lean", "full"):
        decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        found = fast_loss(decoder, positions)
        assert found.item() == pytest.approx(loss.item(), rel=1e-6)
        assert_same(gradients(found, adapters), expected)
    # The modules' weights have become views; transformers still computes the same with them.
    assert torch.allclose(general_loss(model, positions), loss, rtol=1e-6)


@pytest.mark.parametrize(
    ("rank", "targets"), [(256, "all"), (3, "all"), (8, "default"), (8, "down_proj"), (8, "k_proj,gate_proj")]
)
def test_any_rank_and_any_layers_with_adapters(rank: int, targets: str) -> None:
    model, adapters = make_model("llama", rank=rank, targets=targets)
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    found = fast_loss(FastDecoder(model, dtype=torch.float32), None)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert_same(gradients(found, adapters), expected)


def test_stacked_weights_are_not_held_twice() -> None:
    model, _ = make_model("llama")
    decoder = FastDecoder(model, dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    [first, *others] = [getattr(attention, f"{part}_proj").base.weight for part in "qkv"]
    whole = decoder.layers[0][0].qkv.weights.matrix()
    for weight in (first, *others):
        assert weight.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_quantized_weights_are_made_dense_in_one_buffer() -> None:
    model, adapters = make_model("llama, biases, tied head")
    quantize_base(adapters, QuantSpec(quantizer="bnb", bits=4, group_size=64))
    loss = general_loss(model, None)
    expected = gradients(loss, adapters)
    decoder = FastDecoder(model, dtype=torch.float32)
    buffers = {half.weights.matrix().data_ptr() for pair in decoder.layers for half in stacks(pair)}
    assert len(buffers) == 1
    found = fast_loss(decoder, None)
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    assert_same(gradients(found, adapters), expected)
    matrix = decoder.layers[0][0].qkv.weights.matrix()
    dense = torch.cat(
        [
            getattr(model.model.layers[0].self_attn, f"{p}_proj").base.stored.dequantize(torch.float32)
            for p in "qkv"
        ]
    )
    assert torch.equal(matrix[:, : dense.shape[1]], dense)


def stacks(pair: Any) -> list[Any]:
    attention, mlp = pair
    return [attention.qkv, attention.out, mlp.gate_up, mlp.down]


def test_a_stream_wider_than_the_products() -> None:
    """As with autocast: the residual stream in a wider dtype than weights and products."""
    model, adapters = make_model("llama")
    expected = gradients(general_loss(model, None), adapters)
    model.model.embed_tokens.double()
    for module in model.modules():
        if "RMSNorm" in type(module).__name__:
            module.double()
    found = gradients(fast_loss(FastDecoder(model, dtype=torch.float32), None), adapters)
    assert_same(found, expected)


def test_models_and_adapters_without_fast_layers_are_named() -> None:
    capped = hf.AutoModelForCausalLM.from_config(hf.Gemma2Config(**_SHAPE, head_dim=24))
    assert "caps" in (why_general(capped) or "")
    other = hf.AutoModelForCausalLM.from_config(
        hf.OPTConfig(
            vocab_size=97,
            hidden_size=32,
            ffn_dim=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            word_embed_proj_dim=32,
        )
    )
    assert "opt" in (why_general(other) or "")
    dropping = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**_SHAPE, attention_dropout=0.1))
    assert "attention_dropout" in (why_general(dropping) or "")
    plain = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert "dropout" in (
        why_other_adapters(add_adapters(plain, targets="all", settings=settings(dropout=0.1), seed=0)) or ""
    )
    plain = hf.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert "DoRA" in (
        why_other_adapters(add_adapters(plain, targets="all", settings=settings(dora=True), seed=0)) or ""
    )
    assert "no adapters" in (why_other_adapters({}) or "")


def test_a_document_sees_itself_only() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, 8) for _ in range(3))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    both = attend(q, k, v, documents=Documents(1, 12, positions), scale=0.3, window=None)
    alone = attend(q[:, 5:], k[:, 5:], v[:, 5:], documents=Documents(1, 7), scale=0.3, window=None)
    assert torch.allclose(both[:, 5:], alone, atol=1e-6)


def quantize_base(adapters: dict[str, Adapted], spec: QuantSpec) -> None:
    for adapter in adapters.values():
        base: Any = adapter.base
        bias = base.bias.detach() if base.bias is not None else None
        adapter.base = QuantLinear(quantize_weight(base.weight.detach(), spec, torch.float32), bias)


def cosines(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[float]:
    return [
        F.cosine_similarity(found[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in expected
    ]


def outside_fp8(decoder: FastDecoder) -> list[str]:
    return [name for name, stacked in decoder.groups().items() if not stacked.in_fp8]


@pytest.mark.parametrize(
    "spec",
    [QuantSpec(quantizer="fp8", bits=8, group_size=0), QuantSpec(quantizer="bnb", bits=4, group_size=64)],
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
    base = QuantLinear(
        quantize_weight(weight, QuantSpec(quantizer="fp8", bits=8, group_size=0), torch.float32), None
    )
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


def test_groups_whose_products_are_too_far_off_stay_out_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    model, adapters = make_model("llama")
    quantize_base(adapters, QuantSpec(quantizer="fp8", bits=8, group_size=0))
    decoder = FastDecoder(model, dtype=torch.float32, fp8=True)
    assert leave_out_of_fp8(decoder, seed=0) == []
    down = decoder.layers[1][1].down
    measured = down.weights.product
    monkeypatch.setattr(down.weights, "product", lambda rows: 1.5 * measured(rows))
    [(name, error)] = leave_out_of_fp8(decoder, seed=0)
    assert name == "layers.1.down" and error == pytest.approx(0.5, abs=0.05)
    assert not down.in_fp8 and decoder.layers[1][1].gate_up.in_fp8
    loss = fast_loss(decoder, None)
    assert loss.item() == pytest.approx(general_loss(model, None).item(), rel=2e-2)
    assert describe_decoder(decoder, refused=None, left_out=[(name, error)])[0].startswith(
        "base_precision: 1 of 12"
    )


def saved_bytes(decoder: FastDecoder, ids: torch.Tensor, targets: torch.Tensor) -> int:
    """Return the bytes of the tensors that autograd saves in a forward pass, besides parameters; shared ones count once."""
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        decoder.loss(decoder.hidden(ids), targets)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(
    ("name", "rank", "targets", "length"),
    [
        ("llama", 8, "all", 7),
        ("llama", 200, "all", 7),
        ("llama", 8, "all", 128),  # attends by products, and keeps the probabilities
        ("llama", 8, "all", 264),  # computes them again
        ("llama, biases, tied head", 3, "attention", 7),
        ("llama, one head per key", 20, "q_proj,down_proj", 192),
        ("qwen3, QK norms", 8, "all", 7),
        ("gemma", 8, "all", 7),
        ("gemma2 without caps", 8, "all", 7),
        ("gemma3", 8, "all", 7),
    ],
)
def test_a_layer_keeps_what_is_predicted(name: str, rank: int, targets: str, length: int) -> None:
    """Exactly: the plan of a run and the choice of what is recomputed rest on it."""
    model, _ = make_model(name, rank=rank, targets=targets)
    shape = config_shape(model.config.to_dict())
    assert shape is not None and not shape.why_general
    step = Step(
        rank=rank,
        targets=targets,
        batch=2,
        context=length,  # less than a window, which would be a mask on a CPU, and autograd saves masks too
        compute_bits=32,
        weight_bits=32,
        on_gpu=False,
        fast=True,
        recomputes_by_memory=False,
    )
    torch.manual_seed(0)
    ids, wanted = torch.randint(3, VOCABULARY, (2, length)), torch.randint(0, VOCABULARY, (2 * length,))
    for recompute in ("none", "lean"):
        decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)  # type: ignore[arg-type]
        assert describe_layer(decoder, length=length) == fast_layer(shape, step)
        activations, _ = activation_bytes(shape, step, decoder.recompute)
        head = (
            2 * length * shape.hidden * 4
        )  # the gradient of the hidden states, which counts as part of the loss
        assert saved_bytes(decoder, ids, wanted) == activations + head


def test_a_recomputed_layer_keeps_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = make_model("llama")
    fast = FastDecoder(model, dtype=torch.float32, recompute="full")
    kept: list[int] = []
    inner = decoder_module.checkpoint

    def record(run: Any, stream: Any, *others: Any, **options: Any) -> Any:
        kept.append(sum(part.nbytes for part in stream if part is not None))
        return inner(run, stream, *others, **options)

    monkeypatch.setattr(decoder_module, "checkpoint", record)
    ids, rows, _ = make_rows()
    fast.hidden(ids, rows=rows)
    each = ids.numel() * describe_layer(fast, length=ids.shape[1]).kept().full
    assert kept == [each // 2, each, each], "nothing has been added to the embedding"


@pytest.mark.parametrize("recompute", ["none", "lean", "full"])
def test_activations_may_wait_on_the_host(recompute: Any) -> None:
    """What --use_activation_cpu_offload does: saved tensors become copies, and their memory is used for other things."""
    model, adapters = make_model("qwen3, QK norms")
    decoder = FastDecoder(model, dtype=torch.float32, recompute=recompute)
    expected = gradients(fast_loss(decoder, None), adapters)
    copied: list[int] = []

    def pack(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, torch.nn.Parameter) or not tensor.is_floating_point():
            return tensor
        copied.append(tensor.nbytes)
        return tensor.numpy(force=True).copy()

    def unpack(found: Any) -> torch.Tensor:
        return found if isinstance(found, torch.Tensor) else torch.from_numpy(found.copy())

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        loss = fast_loss(decoder, None)
    found = gradients(loss, adapters)
    assert copied and found.keys() == expected.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
