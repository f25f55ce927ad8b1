"""Triton's kernels against the same operations in plain torch: on a GPU, otherwise in Triton's interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import transformers as hf

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="Triton is not installed here: pip install triton")

from crosstune.core.quantization import QuantSpec
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.torch_engine.kernels import torch_operations as plain
from crosstune.torch_engine.kernels import triton_operations as fused
from crosstune.torch_engine.kernels.decoder import FastDecoder
from crosstune.torch_engine.kernels.fp8_weights import Fp8Adapter, Fp8Adapters, Fp8Weights
from crosstune.torch_engine.kernels.operations import Heads, Norm, Quantize, Rows
from crosstune.torch_engine.loading.adapters import add_adapters
from crosstune.torch_engine.quantized import QuantLinear, quantize_weight

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, WIDTH, INNER = 10, 96, 50


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float = 3e-6) -> None:
    assert found.shape == expected.shape
    distance = (found.float() - expected.float()).norm() / expected.float().norm()
    assert distance < bound, f"{distance:.1e}"


def assert_same_rows(found: Rows, expected: Rows) -> None:
    assert_close(found.values, expected.values)
    assert (found.packed is None) == (expected.packed is None)
    if found.packed is not None and expected.packed is not None:
        assert found.scale is not None and expected.scale is not None
        assert_close(found.scale, expected.scale)
        bits, wanted = found.packed.float(), expected.packed.float()
        # A factor that differs in its last bit may move a value by one step, an eighth. Triton's interpreter also loses
        # the carry when a value is rounded up to a power of two.
        near = ((bits - wanted).abs() <= wanted.abs() / 8 + 2**-9) | (
            (bits == wanted / 2) & (DEVICE == "cpu")
        )
        assert bool(near.all())
        assert (bits != wanted).float().mean() < 0.05


def make_norm(size: int) -> Norm:
    return Norm(draw(size), 1e-5, offset=1.0)


def make_places(count: int, width: int) -> list[torch.Tensor]:
    """Return zeros with 16 more columns than are to be written."""
    return [torch.zeros(TOKENS, width + 16, device=DEVICE) for _ in range(count)]


@pytest.mark.parametrize("quantize", [None, Quantize()], ids=["plain", "fp8"])
@pytest.mark.parametrize("with_added", [False, True])
def test_rms_norm(with_added: bool, quantize: Quantize | None) -> None:
    x, added, norm = draw(TOKENS, WIDTH), draw(TOKENS, WIDTH) if with_added else None, make_norm(WIDTH)
    outs = [torch.zeros(TOKENS, WIDTH + 16, device=DEVICE) for _ in range(3)]
    found, expected = (
        way.rms_norm(x, added, norm, out[:, :WIDTH], quantize)
        for way, out in zip((fused, plain), outs, strict=False)
    )
    assert_close(found[0], expected[0])
    assert_close(found[1], expected[1])
    assert_same_rows(found[2], expected[2])
    assert torch.equal(outs[0][:, WIDTH:], outs[2][:, WIDTH:]), "only the rows' own columns are written"
    fused.rebuild_rms_norm(expected[0], expected[1], norm, outs[2][:, :WIDTH])
    assert_close(outs[2], outs[1])
    gradient = draw(TOKENS, WIDTH + 7)[:, :WIDTH]
    for residual in (None, x, draw(TOKENS, WIDTH + 8)[:, :WIDTH]):
        places = make_places(2, WIDTH)
        back, wanted = (
            way.rms_norm_backward(gradient, expected[0], expected[1], norm, residual, place[:, :WIDTH])
            for way, place in zip((fused, plain), places, strict=True)
        )
        assert_close(back, wanted)
        assert not places[0][:, WIDTH:].any()


@pytest.mark.parametrize(
    "heads", [Heads(6, 2, 16, 16), Heads(4, 4, 24, 16), Heads(4, 2, 12, 12)], ids=["shared", "partial", "odd"]
)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("period", [5, 10])
def test_rotation(heads: Heads, normed: bool, period: int) -> None:
    cos, sin = draw(period, heads.rotary // 2), draw(period, heads.rotary // 2)
    norms = (make_norm(heads.size), make_norm(heads.size)) if normed else None
    qkv = draw(TOKENS, heads.width)
    found, expected = (way.rotate(qkv.clone(), cos, sin, heads, norms) for way in (fused, plain))
    for part, wanted in zip(found, expected, strict=True):
        assert_close(part, wanted)
    counts = (heads.num_queries, heads.num_keys, heads.num_keys)
    gradients: Any = tuple(draw(2, count, 5, heads.size).transpose(1, 2) for count in counts)
    raw = qkv if normed else None
    for quantize in (None, Quantize(torch.rand(heads.width, device=DEVICE) + 0.5)):
        places = make_places(2, heads.width)
        back, before = (
            way.rotate_backward(gradients, cos, sin, heads, norms, raw, place[:, : heads.width], quantize)
            for way, place in zip((fused, plain), places, strict=True)
        )
        assert_same_rows(back, before)
        assert not places[0][:, heads.width :].any()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_gated_activations(kind: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_CHUNK", 32)  # a row takes several turns
    both, gradient = draw(TOKENS, 2 * INNER), draw(TOKENS, INNER + 3)[:, :INNER]
    outs = [torch.zeros(TOKENS, INNER + 16, device=DEVICE) for _ in range(4)]
    asked = Quantize() if fp8 else None
    found, expected = (
        way.gate(both, kind, out[:, :INNER], asked) for way, out in zip((fused, plain), outs, strict=False)
    )
    assert_same_rows(found, expected)
    asked = Quantize(torch.rand(2 * INNER, device=DEVICE) + 0.5) if fp8 else None
    places = make_places(3, 2 * INNER)
    inside = [place[:, : 2 * INNER] for place in places]
    back, before = (
        way.gate_backward(gradient, both, kind, out[:, :INNER], place, asked)
        for way, out, place in zip((fused, plain), outs[2:], inside, strict=False)
    )
    assert_same_rows(back, before)
    assert_close(outs[2], outs[3])
    assert_same_rows(fused.gate_backward(gradient, both, kind, None, inside[2], asked), before)
    assert not places[0][:, 2 * INNER :].any()


def test_cross_entropy_and_its_gradient() -> None:
    logits, targets = 5 * draw(7, 5000), torch.randint(0, 5000, (7,), device=DEVICE)
    found, expected = (way.cross_entropy(logits.clone(), targets, gradient=True) for way in (fused, plain))
    assert_close(found[0], expected[0])
    assert found[1] is not None and expected[1] is not None
    assert_close(found[1], expected[1])


@pytest.mark.parametrize("columns", [320, 352])
@pytest.mark.parametrize("double", [True, False])
def test_4_bit_weights_are_bit_for_bit_those_of_bitsandbytes(double: bool, columns: int) -> None:
    spec = QuantSpec(quantizer="bnb", bits=4, group_size=64, double=double)
    # More words than a program takes, whole groups in a row and not, and a second block of nested scales.
    stored = quantize_weight(draw(70, columns), spec, torch.float32)
    # The interpreter loses carries in bf16 too.
    for dtype in (torch.float32, torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.float32,):
        out = torch.zeros(70, columns + 16, dtype=dtype, device=DEVICE)
        fused.make_nf4_dense(stored.tensors(), stored.facts, out[:, :columns])
        assert torch.equal(out[:, :columns], stored.dequantize(dtype))
        assert not out[:, columns:].any()
        beside = draw(70, 20).to(dtype)[:, :12]
        copied = (beside, out[:, columns : columns + 12])
        fused.make_nf4_dense(stored.tensors(), stored.facts, out[:, :columns], copied=copied)
        assert torch.equal(out[:, :columns], stored.dequantize(dtype))
        assert torch.equal(out[:, columns : columns + 12], beside)
        assert not out[:, columns + 12 :].any()
        out = torch.zeros(70 + 48, columns, dtype=dtype, device=DEVICE)
        under = draw(40, columns + 4).to(dtype)[:, :columns]
        fused.make_nf4_dense(stored.tensors(), stored.facts, out[:70], copied=(under, out[70:110]))
        assert torch.equal(out[:70], stored.dequantize(dtype))
        assert torch.equal(out[70:110], under)
        assert not out[110:].any()


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
def test_adapters_are_multiplied_in_fp8_products(size: float) -> None:
    """Both products with adapters beside e4m3 matrices are those without them plus the adapters' own, to the bits of bf16."""
    outputs, inputs, columns = 384, 256, 16
    spec = QuantSpec(quantizer="fp8", bits=8, group_size=0)
    layer = torch.nn.Linear(inputs, outputs, bias=False, device=DEVICE)
    base: Any = QuantLinear(quantize_weight(layer.weight.detach(), spec, torch.float32), None)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weights = Fp8Weights([base], dtype=dtype, columns=columns)
    # Columns of very different sizes, and one of zeros.
    a = (0.01 * draw(columns, inputs) * 2.0 ** torch.arange(-10, 6, device=DEVICE)[:, None]).to(dtype)
    b = (size * draw(outputs, columns)).to(dtype)
    b[:, 3] = 0
    adapters = Fp8Adapters([Fp8Adapter(weights=weights, a=a, b=b)])
    for _ in range(2):  # a second time finds nothing of the first
        adapters.publish()
    forward, backward = adapters.factors_of(0)
    x, gradient = draw(TOKENS, inputs).to(dtype), draw(TOKENS, outputs).to(dtype)
    x[1] = 0
    asked = Quantize(room=weights.room), Quantize(weights.row_scales, room=weights.room)
    for values, quantize, low, both, alone, other, factors in (
        (x, asked[0], x @ a.t(), weights.product_with, weights.product, b.t(), forward),
        (gradient, asked[1], gradient @ b, weights.input_gradient_with, weights.input_gradient, a, backward),
    ):
        low[2] *= 1000  # more than the row's own numbers: it is scaled anew
        rows = fused.quantize_rows(values, quantize)
        assert rows.scale is not None
        scale = rows.scale.clone()
        before, part = alone(rows).float(), low.float() @ other.float()
        found = both(rows, low, factors[:columns]).float()
        distance = (found - before - part).norm(dim=1) / (before + part).norm(dim=1).clamp_min(1e-30)
        anew = (rows.scale != scale)[:, 0]
        assert bool(anew[2]) and (int(anew.sum()) == 1 or size > 1e-6), "only rows that adapters do not fit"
        # A row that was scaled anew is rounded anew. The interpreter loses carries of e4m3 numbers.
        bound = torch.where(anew, 0.06, 0.005) if DEVICE == "cuda" else torch.full((TOKENS,), 0.3)
        assert bool((distance < bound).all()), distance
        usual = ~anew[:, None]
        if DEVICE == "cuda" and bool((part * usual).any()):
            share = ((found - before) * part * usual).sum() / (part * part * usual).sum()
            noise = 2**-9 * before.norm() / (part * usual).norm() / (part.numel() ** 0.5)
            assert abs(share - 1) < 0.05 + 4 * noise, "adapters are lost in larger sums"


@pytest.mark.parametrize("row", [0.0, 1e-7], ids=["zeros", "almost zeros"])
def test_a_row_without_weights_leaves_room_for_the_others(row: float) -> None:
    """A row of zeros has the smallest scale, and the number of an adapter that is divided by it is very large."""
    weight = 0.05 * draw(64, 128)
    weight[5] *= row
    spec = QuantSpec(quantizer="fp8", bits=8, group_size=0)
    base: Any = QuantLinear(quantize_weight(weight, spec, torch.float32), None)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weights = Fp8Weights([base], dtype=dtype, columns=16)
    assert torch.equal(weights.dense(), base.stored.dequantize(dtype))
    if not weights.room:  # adapters are multiplied by themselves
        assert row
        return
    a, b = (draw(16, 128) / 128**0.5).to(dtype), (0.01 * draw(64, 16)).to(dtype)
    adapters = Fp8Adapters([Fp8Adapter(weights=weights, a=a, b=b)])
    adapters.publish()
    x = draw(TOKENS, 128).to(dtype)
    rows = fused.quantize_rows(x, Quantize(room=weights.room))
    found = weights.product_with(rows, x @ a.t(), adapters.factors_of(0)[0]).float()
    expected = x.float() @ weight.t() + (x @ a.t()).float() @ b.float().t()
    distance = (found - expected).norm() / expected.norm()
    assert distance < (0.06 if DEVICE == "cuda" else 0.15), distance


def test_columns_of_nothing_or_next_to_it_do_not_push_rows_out_of_their_range() -> None:
    """Gradients of x A that are multiplied with zeros do not set the scale of a row; the smallest numbers give no NaN."""
    spec = QuantSpec(quantizer="fp8", bits=8, group_size=0)
    weight = 0.05 * draw(64, 128)
    base: Any = QuantLinear(quantize_weight(weight, spec, torch.float32), None)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weights = Fp8Weights([base], dtype=dtype, columns=16)
    a, b = torch.zeros(16, 128, dtype=dtype, device=DEVICE), (1e3 * draw(64, 16)).to(dtype)
    a[0, 3] = 1e-40
    adapters = Fp8Adapters([Fp8Adapter(weights=weights, a=a, b=b)])
    adapters.publish()
    gradient = draw(TOKENS, 64).to(dtype)
    rows = fused.quantize_rows(gradient, Quantize(weights.row_scales, room=weights.room))
    before = weights.input_gradient(rows)
    found = weights.input_gradient_with(rows, gradient @ b, adapters.factors_of(0)[1])
    assert_close(found, before, 0.01)
    x = draw(TOKENS, 128).to(dtype)
    rows = fused.quantize_rows(x, Quantize(room=weights.room))
    before = weights.product(rows)
    assert_close(weights.product_with(rows, x @ a.t(), adapters.factors_of(0)[0]), before, 0.01)


@pytest.mark.parametrize("fp8", [False, True], ids=["dense", "fp8"])
def test_a_whole_model_with_fused_operations(fp8: bool) -> None:
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = hf.Qwen3Config(**shape, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model: Any = hf.AutoModelForCausalLM.from_config(config).to(DEVICE)
    settings = AdapterSettings(rank=4, alpha=8, dropout=0.0, rank_stabilized=False, magnitudes=False)
    adapters = add_adapters(model, targets="all", settings=settings, seed=0)
    for adapter in adapters.values():
        adapter.lora_B.data.normal_(0, 0.1)
        if fp8:
            base: Any = adapter.base
            spec = QuantSpec(quantizer="fp8", bits=8, group_size=0)
            adapter.base = QuantLinear(quantize_weight(base.weight.detach(), spec, torch.float32), None)
    ids, targets = torch.randint(0, 64, (2, 6), device=DEVICE), torch.randint(0, 64, (12,), device=DEVICE)
    losses, gradients = [], []
    for way in (fused, plain):
        decoder = FastDecoder(model, dtype=torch.float32, operations=way, fp8=fp8 and DEVICE == "cpu")
        loss = decoder.loss(decoder.hidden(ids), targets)
        for adapter in adapters.values():
            adapter.zero_grad()
        loss.backward()
        losses.append(loss.item())
        gradients.append(
            [p.grad.clone() for a in adapters.values() for p in a.parameters() if p.grad is not None]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if fp8 else 1e-5)
    for found, expected in zip(*gradients, strict=True):
        assert_close(found, expected, 0.2 if fp8 else 1e-4)


@pytest.mark.parametrize("programs", [1, 512], ids=["whole rows", "split rows"])
@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize(("queries", "keys", "size"), [(4, 4, 16), (6, 2, 24), (3, 1, 64)])
def test_attention_over_a_cache(
    programs: int, window: int | None, queries: int, keys: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crosstune.torch_engine.kernels import triton_cache

    monkeypatch.setattr(triton_cache, "_PROGRAMS", programs)
    rows, columns = 3, 150
    positions = torch.tensor([0, 77, columns - 1], device=DEVICE)
    packed = draw(rows, (queries + 2 * keys) * size)
    parts = packed.split([queries * size, keys * size, keys * size], dim=1)
    q, k, v = (part.unflatten(1, (-1, size)) for part in parts)
    cache = [draw(rows, columns, keys, size) for _ in range(2)]
    expected = [each.clone() for each in cache]
    for each, new in zip(expected, (k, v), strict=True):
        each[torch.arange(rows, device=DEVICE), positions] = new
    triton_cache.store(k, v, *cache, positions)
    assert all(torch.equal(*pair) for pair in zip(cache, expected, strict=True))
    places = torch.arange(columns, device=DEVICE)
    seen = places <= positions[:, None]
    if window is not None:
        seen &= places > positions[:, None] - window
    scores = torch.einsum("nkgd,ntkd->nkgt", q.unflatten(1, (keys, -1)), expected[0]) * 0.3
    weights = scores.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
    wanted = torch.einsum("nkgt,ntkd->nkgd", weights, expected[1]).flatten(1, 2)
    assert_close(triton_cache.attend_cached(q, *cache, positions, scale=0.3, window=window), wanted)


def test_generation_with_the_kernels_of_the_cache() -> None:
    from crosstune.core.sampling import GREEDY
    from crosstune.torch_engine.generate.answers import sample_answers
    from crosstune.torch_engine.generate.fast import FastRows

    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = hf.Qwen3Config(**shape, **heads, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    model: Any = hf.AutoModelForCausalLM.from_config(config).to(DEVICE)
    found = []
    for way in (fused, plain):
        rows = FastRows(FastDecoder(model, dtype=torch.float32, operations=way))
        assert rows.by_kernel == (way is fused)
        options: dict[str, Any] = {"max_new_tokens": 4, "stop_ids": [], "sampling": GREEDY}
        with torch.inference_mode():
            found.append(sample_answers(rows, [[5, 6, 7], [9], [8, 9]], most_rows=2, **options))
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
