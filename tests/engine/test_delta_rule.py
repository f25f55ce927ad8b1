"""The gated delta rule in chunks against its definition, token by token, and the layers that use it."""

from __future__ import annotations

import pytest
import torch

from crosstune.torch_engine.kernels.chunked_scans import chunk_gated_delta_rule


def by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in fp64: the state decays, and the value that a key reads from it moves towards the new one."""
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    query, key = (x.repeat_interleave(value.shape[2] // key.shape[2], dim=2) for x in (query, key))
    outputs = []
    for t in range(query.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        change = (value[:, t] - read) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], change)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * query.shape[-1] ** -0.5)
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("shared_by", [1, 2])
@pytest.mark.parametrize("length", [5, 64, 150])
def test_chunks_equal_the_definition(length: int, shared_by: int) -> None:
    """Also if several heads of values share a head of keys."""
    torch.manual_seed(0)
    heads = 3 * shared_by
    query, key, value = (
        torch.randn(2, length, 3, 8),
        torch.randn(2, length, 3, 8),
        torch.randn(2, length, heads, 12),
    )
    g, beta = -0.05 * torch.rand(2, length, heads), torch.rand(2, length, heads)
    given = [query, key, value, g, beta, torch.randn(2, heads, 8, 12)]
    upstream = torch.randn(2, length, heads, 12), torch.randn(2, heads, 8, 12)
    found = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        if dtype == torch.float64:
            outputs = by_token(*inputs)
        else:
            out, state = chunk_gated_delta_rule(
                *inputs[:5], initial_state=inputs[5], output_final_state=True, use_qk_l2norm_in_kernel=True
            )
            assert state is not None
            outputs = out, state
        gradients = torch.autograd.grad(outputs, inputs, [x.to(dtype) for x in upstream])
        found.append([*outputs, *gradients])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() < 1e-6 * expected.norm()


def test_similar_keys_without_decay_are_solved_as_precisely() -> None:
    """The system of a chunk is then full: powers of its matrix have elements of 1e17."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 128, 1, 16) for _ in range(3))
    key = key[:, :1] + 1e-3 * key
    g, beta = torch.zeros(1, 128, 1), torch.ones(1, 128, 1)
    expected, _ = by_token(*(x.double() for x in (query, key, value, g, beta, torch.zeros(1, 1, 16, 16))))
    found, _ = chunk_gated_delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel=True)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.cuda
def test_16_bits_on_a_gpu_keep_the_error_of_their_rounding() -> None:
    torch.manual_seed(0)
    sizes = ((4, 16), (4, 16), (8, 16))
    query, key, value = (torch.randn(2, 300, *size).bfloat16() for size in sizes)
    g, beta = -0.05 * torch.rand(2, 300, 8), torch.rand(2, 300, 8).bfloat16()
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [
            x.to(device, x.dtype if x.dtype == torch.float32 else dtype) for x in (query, key, value, g, beta)
        ]
        inputs = [x.detach().requires_grad_() for x in inputs]
        out, _ = chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
        found.append([x.float().cpu() for x in (out, *gradients)])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() < 0.01 * expected.norm()
