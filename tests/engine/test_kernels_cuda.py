"""The fast layers on an NVIDIA GPU: Triton against plain torch in a whole model, attention kernels, fp8, memory."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf

from crosstune.core.quantization import QuantSpec
from crosstune.data.batches.token_batch import IGNORED, TokenBatch
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.kernels import torch_operations
from crosstune.torch_engine.kernels.attention import Documents, attend, attends_by_document, prefer_cudnn
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import why_no_fp8
from crosstune.torch_engine.loading.adapters import Adapted, add_adapters
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight
from crosstune.torch_engine.tasks.causal_lm import CausalLM

pytestmark = pytest.mark.cuda

SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
SHAPE |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.05}
CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SHAPE),
    "mistral": lambda: hf.MistralConfig(**SHAPE, sliding_window=48),
    "qwen2": lambda: hf.Qwen2Config(**SHAPE),
    "qwen3": lambda: hf.Qwen3Config(**SHAPE, head_dim=64),
    "gemma": lambda: hf.GemmaConfig(**SHAPE, head_dim=64),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SHAPE, head_dim=64, sliding_window=48, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: hf.Phi3Config(**SHAPE, partial_rotary_factor=0.5),
}
ROWS, LENGTH, FIRST = 2, 128, 50


def make(
    name: str, dtype: torch.dtype, spec: QuantSpec | None = None, **changed: Any
) -> tuple[Any, dict[str, Adapted]]:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config.update(changed)
    model: Any = hf.AutoModelForCausalLM.from_config(config).to("cuda", dtype)
    settings = AdapterSettings(rank=8, alpha=16, dropout=0.0, rank_stabilized=False, magnitudes=False)
    adapters = add_adapters(model, targets="all", settings=settings, seed=0)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.05)
        if spec is not None:
            base: Any = adapter.base
            bias = base.bias.detach() if base.bias is not None else None
            adapter.base = QuantLinear(quantize_weight(base.weight.detach(), spec, dtype), bias)
    return model, adapters


def make_batch(*, packed: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    ids = torch.randint(3, 512, (ROWS, LENGTH), device="cuda")
    if not packed:
        return {"input_ids": ids}
    one = torch.cat([torch.arange(FIRST), torch.arange(LENGTH - FIRST)])
    starts = [start for row in range(ROWS) for start in (row * LENGTH, row * LENGTH + FIRST)]
    bounds = torch.tensor([*starts, ROWS * LENGTH], dtype=torch.int32, device="cuda")
    return {"input_ids": ids, "positions": one.repeat(ROWS, 1).cuda(), "bounds": bounds}


def step(decoder: FastDecoder, adapters: dict[str, Adapted], batch: dict[str, Any]) -> tuple[float, Any]:
    torch.manual_seed(2)
    targets = torch.randint(0, 512, (ROWS * LENGTH,), device="cuda")
    for adapter in adapters.values():
        adapter.zero_grad()
    loss = decoder.loss(decoder.hidden(**batch), targets)
    loss.backward()
    found = {
        f"{name}.{part}": parameter.grad.float().clone()
        for name, adapter in adapters.items()
        for part, parameter in adapter.trained().items()
        if parameter.grad is not None
    }
    return loss.item(), found


def worst_cosine(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys() and expected
    return min(
        F.cosine_similarity(found[name].flatten(), expected[name].flatten(), dim=0).item()
        for name in expected
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_with_triton_is_near_fp32_with_torch(name: str, packed: bool) -> None:
    model, adapters = make(name, torch.bfloat16)
    wide = copy.deepcopy(model).float()
    wide_adapters: Any = {part: wide.get_submodule(part) for part in adapters}
    batch = make_batch(packed=packed)
    reference = FastDecoder(wide, dtype=torch.float32, operations=torch_operations)
    expected_loss, expected = step(reference, wide_adapters, batch)
    for recompute in ("none", "lean", "full"):
        decoder = FastDecoder(model, dtype=torch.bfloat16, recompute=recompute)  # type: ignore[arg-type]
        loss, found = step(decoder, adapters, batch)
        assert loss == pytest.approx(expected_loss, rel=2e-3)
        assert worst_cosine(found, expected) > 0.998


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_nf4_is_dense_with_the_same_values(name: str) -> None:
    spec = QuantSpec(quantizer="bnb", bits=4, group_size=64)
    model, adapters = make(name, torch.bfloat16, spec)
    decoder = FastDecoder(model, dtype=torch.bfloat16)
    for stacked in decoder.groups().values():
        matrix = stacked.weights.matrix()[:, : stacked.num_inputs]
        dense = torch.cat([base.stored.dequantize(torch.bfloat16) for base in stacked.weights.bases])
        assert torch.equal(matrix, dense)
    loss, found = step(decoder, adapters, make_batch(packed=False))
    for adapter in adapters.values():  # the same values in a plain layer
        base: Any = adapter.base
        plain = torch.nn.Linear(base.in_features, base.out_features, bias=base.bias is not None)
        plain = plain.to("cuda", torch.bfloat16).requires_grad_(False)
        plain.weight.data = base.stored.dequantize(torch.bfloat16)
        if base.bias is not None:
            plain.bias.data = base.bias
        adapter.base = plain
    again, expected = step(FastDecoder(model, dtype=torch.bfloat16), adapters, make_batch(packed=False))
    assert loss == pytest.approx(again, rel=1e-3) and worst_cosine(found, expected) > 0.999


@pytest.mark.parametrize("quantizer", ["fp8", "bnb"])
def test_fp8_products_on_tensor_cores_are_those_computed_in_fp32(quantizer: str) -> None:
    reason = why_no_fp8(torch.device("cuda"), torch.bfloat16)
    if reason is not None:
        pytest.skip(f"no fp8 matmul on this GPU: {reason}")
    spec = QuantSpec(quantizer=quantizer, bits=8 if quantizer == "fp8" else 4, group_size=64)
    # Weights as models start with: larger ones make the gradients of queries and keys chaotic, and rounding matters more.
    model, adapters = make("llama", torch.bfloat16, spec, initializer_range=0.02)
    exact_loss, exact = step(FastDecoder(model, dtype=torch.bfloat16), adapters, make_batch(packed=False))
    decoder = FastDecoder(model, dtype=torch.bfloat16, fp8=True)
    assert sum(stacked.in_fp8 for stacked in decoder.groups().values()) == 4 * len(decoder.layers) - 2
    loss, found = step(decoder, adapters, make_batch(packed=False))
    assert loss == pytest.approx(exact_loss, rel=1e-2)
    assert worst_cosine(found, exact) > 0.98


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("num_keys", [4, 2])
def test_attention_over_documents_is_attention_with_a_mask(window: int | None, num_keys: int) -> None:
    batch = make_batch(packed=True)
    torch.manual_seed(3)
    q, k, v = (torch.randn(ROWS, LENGTH, heads, 64, device="cuda") for heads in (4, num_keys, num_keys))
    wide = Documents(ROWS, LENGTH, batch["positions"], batch["bounds"])
    expected = attend(q, k, v, documents=wide, scale=0.1, window=window)
    narrow = [part.bfloat16().requires_grad_() for part in (q, k, v)]
    documents = Documents(ROWS, LENGTH, batch["positions"], batch["bounds"])
    with prefer_cudnn(q.device):
        found = attend(*narrow, documents=documents, scale=0.1, window=window)
    assert not documents._masks or window is not None, "no mask is built where documents have a kernel"
    assert (found.float() - expected).norm() / expected.norm() < 1e-2
    found.float().square().sum().backward()
    assert all(part.grad is not None and bool(part.grad.isfinite().all()) for part in narrow)


def test_a_step_does_not_wait_for_the_device() -> None:
    model, adapters = make("llama", torch.bfloat16)
    decoder = FastDecoder(model, dtype=torch.bfloat16)
    batch = make_batch(packed=False)
    targets = torch.zeros(ROWS * LENGTH, dtype=torch.int64, device="cuda")
    decoder.loss(decoder.hidden(**batch), targets).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        decoder.loss(decoder.hidden(**batch), targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert adapters


def test_rows_of_different_lengths_are_computed_without_padding() -> None:
    model, _ = make("llama", torch.bfloat16)
    decoder = FastDecoder(model, dtype=torch.bfloat16)
    assert decoder.drops_padding == attends_by_document(torch.device("cuda"), torch.bfloat16, None)
    task = CausalLM()
    task.decoder = decoder
    draw = np.random.default_rng(0)
    real = np.arange(LENGTH) < np.array([[LENGTH], [FIRST]])
    batch = TokenBatch(
        input_ids=np.where(real, draw.integers(3, 512, real.shape), 0).astype(np.int32),
        targets=np.where(real, draw.integers(3, 512, real.shape), IGNORED).astype(np.int32),
        segments=real.astype(np.int32),
        positions=np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1)),
    )
    losses = []
    for drops_padding in (False, decoder.drops_padding):
        decoder.drops_padding = drops_padding
        arrays = {name: torch.from_numpy(array).cuda() for name, array in task.arrays(batch).items()}
        losses.append(float(task.loss(model, arrays)[0]))
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)
