"""Rows of a batch are rounded as they are alone: products, attention after cached tokens, what is left as it is."""

from __future__ import annotations

import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra crosstune[torch]")
from torch.nn import functional  # noqa: E402

from crosstune.torch_engine import steady_attention, steady_products, steady_rounding  # noqa: E402
from crosstune.torch_engine.steady_rounding import SteadyRounding  # noqa: E402

attend = functional.scaled_dot_product_attention


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend_in_fp64(monkeypatch: pytest.MonkeyPatch, scores_at_once: int) -> None:
    monkeypatch.setattr(steady_attention, "alike_widths", lambda *_: ())
    monkeypatch.setattr(steady_rounding, "SCORES_AT_ONCE", scores_at_once)


@pytest.mark.parametrize("inputs, outputs", [(576, 192), (1536, 576), (64, steady_products.WIDE + 8)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_does_not_depend_on_the_rows_beside_it(inputs: int, outputs: int, biased: bool) -> None:
    rows, weight = draw(300, inputs), draw(outputs, inputs)
    bias = draw(outputs) if biased else None
    plain = functional.linear(rows, weight, bias)
    with torch.inference_mode(), SteadyRounding():
        whole = functional.linear(rows, weight, bias)
        parts = [functional.linear(part, weight, bias) for part in rows.split([1, 2, 5, 60, 92, 140])]
        deep = functional.linear(rows.reshape(3, 4, 25, inputs), weight, bias)
    torch.testing.assert_close(whole, plain, rtol=1e-4, atol=1e-3)
    assert torch.equal(torch.cat(parts), whole)
    assert deep.shape == (3, 4, 25, outputs) and torch.equal(deep.reshape(300, outputs), whole)


def test_transposed_weights_as_in_gpt2() -> None:
    rows, weight, bias = draw(70, 1536), draw(1536, 576), draw(576)
    with torch.inference_mode(), SteadyRounding():
        whole = torch.addmm(bias, rows, weight)
        parts = [torch.addmm(bias, part, weight) for part in rows.split([3, 67])]
        scaled = torch.addmm(bias, rows, weight, beta=0.0)
    torch.testing.assert_close(whole, bias + rows @ weight, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(scaled, rows @ weight, rtol=1e-4, atol=1e-3)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("scores_at_once", [None, 1, 2**25])
def test_attention_does_not_depend_on_cached_tokens_and_padding(
    monkeypatch: pytest.MonkeyPatch, scores_at_once: int | None
) -> None:
    """In fp32, and in fp64 where no numbers of keys are known to round alike."""
    if scores_at_once:
        attend_in_fp64(monkeypatch, scores_at_once)
    length, cached, padding, size = 600, 530, 37, 64
    query, key, value = (draw(3, 2, length, size + n)[..., :size] for n in range(3))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    padded = functional.pad(seen[cached:], (padding, 0))
    filled = [functional.pad(tensor, (0, 0, padding, 0), value=3.0) for tensor in (key, value)]
    exact = attend(query.double(), key.double(), value.double(), is_causal=True)
    with torch.inference_mode(), SteadyRounding():
        whole = attend(query, key, value, is_causal=True)
        for mask in (
            padded,
            padded.expand(3, 1, -1, -1),
            torch.zeros(padded.shape).masked_fill(~padded, -torch.inf),
        ):
            after = attend(query[:, :, cached:], *filled, mask)
            # In a few millions a number lies so near the middle of two others that the order of additions decides.
            assert (after != whole[:, :, cached:]).sum() <= 2
            torch.testing.assert_close(after, whole[:, :, cached:], rtol=2e-7, atol=1e-9)
    assert whole.dtype == torch.float32
    close = {"rtol": 1e-7, "atol": 1e-9} if scores_at_once else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(whole.double(), exact, **close)


def test_16_bit_numbers_and_devices_without_fp64_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = draw(5, 64), draw(32, 64)
    half, short = rows.bfloat16(), weight.bfloat16()
    query = draw(1, 2, 8, 16)
    with torch.inference_mode():
        plain = functional.linear(half, short), attend(query, query, query), rows.mean(-1)
        with SteadyRounding():
            assert torch.equal(functional.linear(half, short), plain[0])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert functional.linear(rows, weight).dtype == torch.bfloat16
            monkeypatch.setattr(steady_attention, "alike_widths", lambda *_: ())
            monkeypatch.setattr(steady_rounding, "DEVICES_WITH_FP64", ())
            assert torch.equal(attend(query, query, query), plain[1])
            assert torch.equal(rows.mean(-1), plain[2])
            assert steady_rounding.widest(half).dtype == torch.float32


def test_a_mean_is_rounded_once() -> None:
    rows = draw(50, 576)
    with torch.inference_mode(), SteadyRounding():
        found = rows.pow(2).mean(-1, keepdim=True)
    assert torch.equal(found, rows.pow(2).double().mean(-1, keepdim=True).float())
    with torch.inference_mode(), SteadyRounding():
        assert torch.equal(torch.mean(input=rows, dim=0), rows.double().mean(0).float())
        assert rows.mean(-1, dtype=torch.float64).dtype == torch.float64
        assert rows.mean(-1, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize(
    "act",
    [
        functional.silu,
        functools.partial(functional.gelu, approximate="tanh"),
        torch.sigmoid,
        functional.softplus,
        functional.mish,
        torch.nn.SiLU(),
    ],
    ids=["silu", "gelu", "sigmoid", "softplus", "mish", "module"],
)
def test_an_activation_does_not_depend_on_the_rows_beside_it(act: Any, threads: int) -> None:
    """torch computes the last elements of each thread's part by other code."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = draw(53 * 37, 1536 + 7)
        with torch.inference_mode(), SteadyRounding():
            whole, parts = act(rows), [act(part) for part in rows.split([1, 36, 53, 1871])]
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(whole, act(rows))
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("multiply", [torch.matmul, torch.Tensor.matmul, lambda rows, weight: rows @ weight])
def test_products_by_an_operator_as_in_falcon(multiply: Any) -> None:
    rows, weight = draw(70, 1536), draw(192, 1536).t()
    with torch.inference_mode(), SteadyRounding():
        whole = multiply(rows[None], weight)[0]
        parts = [multiply(part, weight) for part in rows.split([1, 2, 67])]
        vector = multiply(rows[0], weight)
        products = multiply(rows[None, :4], weight[None])
    torch.testing.assert_close(whole, rows @ weight, rtol=1e-4, atol=1e-3)
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(vector, whole[0]) and products.shape == (1, 4, 192)


def test_operands_by_name() -> None:
    rows, weight, bias = draw(5, 64), draw(64, 32), draw(32)
    with torch.inference_mode(), SteadyRounding():
        found = torch.addmm(input=bias, mat1=rows, mat2=weight)
    torch.testing.assert_close(found, bias + rows @ weight)


@pytest.mark.parametrize("scores_at_once", [None, 1, 100, 2**25])
@pytest.mark.parametrize(
    "query, key, value, options",
    [
        ((20, 8), (20, 8), (20, 8), {}),
        ((4, 20, 8), (4, 20, 8), (4, 20, 8), {"is_causal": True}),
        ((4, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 8), {}),
        ((4, 2, 20, 8), (4, 1, 20, 8), (4, 1, 20, 8), {"is_causal": True}),
        ((4, 2, 20, 8), (4, 2, 9, 8), (4, 2, 9, 8), {"is_causal": True}),
        ((4, 2, 9, 8), (4, 2, 20, 8), (4, 2, 20, 8), {"is_causal": True}),
        ((4, 2, 9, 8), (4, 2, 20, 8), (4, 2, 20, 12), {"is_causal": True}),
        ((4, 2, 20, 8), (4, 2, 9, 8), (4, 2, 9, 12), {"is_causal": True}),
        ((4, 4, 9, 8), (4, 2, 20, 8), (4, 2, 20, 12), {"enable_gqa": True, "scale": 0.3}),
        ((0, 2, 9, 8), (0, 2, 9, 8), (0, 2, 9, 8), {}),
        *(
            ((4, 2, 9, 8), (4, 2, 20, 8), (4, 2, 20, 8), {"attn_mask": shape})
            for shape in (
                (9, 20),
                (1, 20),
                (2, 9, 20),
                (4, 1, 1, 20),
                (4, 1, 9, 1),
                (1, 2, 9, 20),
                (4, 2, 9, 20),
            )
        ),
    ],
)
def test_attention_in_parts_is_the_attention_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    scores_at_once: int | None,
    query: tuple[int, ...],
    key: tuple[int, ...],
    value: tuple[int, ...],
    options: dict[str, Any],
) -> None:
    if scores_at_once:
        attend_in_fp64(monkeypatch, scores_at_once)
    tensors = [draw(*shape) for shape in (query, key, value)]
    if "attn_mask" in options:
        options = {"attn_mask": draw(*options["attn_mask"])}
    wide = {name: value.double() if name == "attn_mask" else value for name, value in options.items()}
    with torch.inference_mode():
        exact = attend(*(tensor.double() for tensor in tensors), **wide)
        with SteadyRounding():
            found = attend(*tensors, **options)
    assert found.shape == exact.shape and found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-7)


def test_the_scores_of_a_long_prompt_are_never_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    attend_in_fp64(monkeypatch, 2 * 8 * 64)
    held = []

    def counted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        held.append(query.shape[:-1].numel() * key.shape[-2])
        return attend(query, key, value, **options)

    monkeypatch.setitem(
        steady_rounding._STEADY,
        attend,
        lambda _, *args, **options: steady_rounding._attention(counted, *args, **options),
    )
    query, key, value = draw(3, 2, 64, 16), draw(3, 2, 64, 16), draw(3, 2, 64, 8)
    with torch.inference_mode(), SteadyRounding():
        attend(query, key, value, is_causal=True)
    assert len(held) == 3 * 8 and max(held) <= 2 * 8 * 64
