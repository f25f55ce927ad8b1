"""The operations of the fast layers in plain torch against torch's own derivatives in fp64, and in bf16 against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from crosstune.torch_engine.kernels import head_loss
from crosstune.torch_engine.kernels import torch_operations as plain
from crosstune.torch_engine.kernels.operations import Heads, Norm

TOKENS, WIDTH, INNER = 12, 40, 24
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}
Bounds = pytest.mark.parametrize(("dtype", "bound"), DTYPES.items(), ids=str)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return normal numbers that `dtype` has exactly, in fp64."""
    return torch.randn(*shape).to(dtype).double()


def assert_close(found: torch.Tensor, expected: torch.Tensor, bound: float) -> None:
    assert found.shape == expected.shape
    distance = (found.double() - expected).norm() / expected.norm()
    assert distance < bound, f"{distance:.1e}"


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@Bounds
@pytest.mark.parametrize("residual", [False, True])
def test_norms(dtype: torch.dtype, bound: float, residual: bool) -> None:
    x, added, upstream, beside = (draw(TOKENS, WIDTH, dtype=dtype) for _ in range(4))
    norm = Norm(draw(WIDTH, dtype=dtype).to(dtype), 1e-5, offset=1.0)
    total = (x + added).to(dtype).double().requires_grad_()
    normalized = F.rms_norm(total, (WIDTH,), 1.0 + norm.weight.double(), norm.eps)
    [expected] = torch.autograd.grad(normalized, total, upstream)
    outs = [torch.zeros(TOKENS, WIDTH + 8, dtype=dtype) for _ in range(2)]
    kept, rstd, rows = plain.rms_norm(x.to(dtype), added.to(dtype), norm, outs[0][:, :WIDTH])
    assert_close(kept, total.detach(), bound)
    assert_close(rows.values, normalized.detach(), bound)
    plain.rebuild_rms_norm(kept, rstd, norm, outs[1][:, :WIDTH])
    assert torch.equal(*outs) and not outs[0][:, WIDTH:].any()
    place = torch.zeros(TOKENS, WIDTH + 8, dtype=dtype)
    found = plain.rms_norm_backward(
        upstream.to(dtype), kept, rstd, norm, beside.to(dtype) if residual else None, place[:, :WIDTH]
    )
    assert found.data_ptr() == place.data_ptr() and not place[:, WIDTH:].any()
    assert_close(found, expected + beside if residual else expected, bound)


@Bounds
@pytest.mark.parametrize("heads", [Heads(6, 2, 16, 16), Heads(4, 4, 24, 16)], ids=["shared", "partial"])
@pytest.mark.parametrize("normed", [False, True])
def test_rotations(dtype: torch.dtype, bound: float, heads: Heads, normed: bool) -> None:
    qkv = draw(TOKENS, heads.width, dtype=dtype).requires_grad_()
    cos, sin = draw(TOKENS // 2, heads.rotary // 2), draw(TOKENS // 2, heads.rotary // 2)
    norms = (Norm(draw(heads.size), 1e-5), Norm(draw(heads.size), 1e-5)) if normed else None
    parts = list(plain.split_heads(qkv, heads))
    for index in range(2):
        if norms is not None:
            parts[index] = F.rms_norm(parts[index], (heads.size,), norms[index].weight, 1e-5)
        parts[index] = turned(parts[index], cos, sin, heads.rotary)
    upstream = [draw(*part.shape, dtype=dtype) for part in parts]
    [expected] = torch.autograd.grad(parts, qkv, upstream)
    raw = qkv.detach().to(dtype)
    for found, wanted in zip(plain.rotate(raw.clone(), cos, sin, heads, norms), parts, strict=True):
        assert found.dtype == dtype
        assert_close(found, wanted.detach(), bound)
    given: Any = tuple(part.to(dtype).unflatten(0, (2, -1)) for part in upstream)
    before = [part.clone() for part in given]
    place = torch.zeros(TOKENS, heads.width + 8, dtype=dtype)
    back = plain.rotate_backward(
        given, cos, sin, heads, norms, raw if normed else None, place[:, : heads.width]
    )
    assert back.values.data_ptr() == place.data_ptr() and not place[:, heads.width :].any()
    assert_close(back.values, expected, bound)
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True)), "gradients stay as they were"


def turned(part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary: int) -> torch.Tensor:
    cos, sin = (table.repeat(2, 2)[:, None] for table in (cos, sin))
    first, second, rest = part.split([rotary // 2, rotary // 2, part.shape[-1] - rotary], dim=-1)
    mixed = torch.cat([first, second], dim=-1) * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([mixed, rest], dim=-1)


@Bounds
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_gated_activations(dtype: torch.dtype, bound: float, kind: str) -> None:
    functions: dict[str, Any] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    both = draw(TOKENS, 2 * INNER, dtype=dtype).requires_grad_()
    upstream = draw(TOKENS, INNER + 3, dtype=dtype)[:, :INNER]
    gates, ups = both.chunk(2, dim=-1)
    product = functions[kind](gates) * ups
    [expected] = torch.autograd.grad(product, both, upstream)
    outs = [torch.zeros(TOKENS, INNER + 8, dtype=dtype) for _ in range(2)]
    given = both.detach().to(dtype)
    plain.gate(given, kind, outs[0][:, :INNER])
    assert_close(outs[0][:, :INNER], product.detach(), bound)
    places = [torch.zeros(TOKENS, 2 * INNER + 8, dtype=dtype) for _ in range(2)]
    inside = [place[:, : 2 * INNER] for place in places]
    found = plain.gate_backward(upstream.to(dtype), given, kind, outs[1][:, :INNER], inside[0])
    assert torch.equal(*outs) and not outs[0][:, INNER:].any()
    assert_close(found.values, expected, bound)
    plain.gate_backward(upstream.to(dtype), given, kind, None, inside[1])
    assert torch.equal(*places) and not places[0][:, 2 * INNER :].any()


@Bounds
def test_the_loss_and_its_gradient(dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "LOGITS_IN_CACHE", 3 * 50)  # four blocks, the last of them smaller
    logits = (5 * draw(11, 50)).to(dtype).double().requires_grad_()
    targets = torch.randint(0, 50, (11,))
    wanted = F.cross_entropy(logits, targets, reduction="sum")
    [expected] = torch.autograd.grad(wanted, logits)
    given = logits.detach().to(dtype)
    only, none = plain.cross_entropy(given, targets, gradient=False)
    assert none is None and torch.equal(given, logits.detach().to(dtype))
    found, gradient = plain.cross_entropy(given, targets, gradient=True)
    assert gradient is not None and gradient.dtype == dtype and torch.equal(found, only)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    assert_close(found, wanted.detach(), min(bound, 1e-6))
    assert_close(gradient, expected, bound)


def test_a_loss_over_several_chunks_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        head_loss, "rows_at_a_time", lambda *_, **__: 4
    )  # three chunks, the last of them smaller
    hidden, weight = draw(11, 8).requires_grad_(), draw(50, 8)
    targets = torch.randint(0, 50, (11,))
    logits = hidden @ weight.t()
    wanted = F.cross_entropy(logits, targets, reduction="none")
    expected = torch.autograd.grad(wanted.sum(), hidden, retain_graph=True)[0]
    each = head_loss.head_token_losses(hidden, weight, targets, plain)[0]
    for found in (head_loss.head_loss(hidden, weight, targets, plain), each.sum()):
        assert_close(found.detach(), wanted.detach().sum(), 1e-6)
        assert_close(torch.autograd.grad(found, hidden)[0], expected, 1e-5)
    assert_close(each.detach(), wanted.detach(), 1e-5)
    total, wrong = head_loss.head_errors(hidden, weight, targets, plain)
    assert_close(total, wanted.detach().sum(), 1e-6)
    assert torch.equal(wrong, logits.argmax(dim=-1) != targets)
