"""The scan of Mamba-2 in chunks against its definition, token by token, and the layers that use it."""

from __future__ import annotations

import pytest
import torch
from support import tiny_config
from transformers import AutoModelForCausalLM

from crosstune.torch_engine.kernels.chunked_scans import chunk_scan, use_chunked_scans


def by_token(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor,
    bias: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition in fp64: the state decays, and each token adds to it and reads from it."""
    b, c = (group.repeat_interleave(x.shape[2] // group.shape[2], dim=2) for group in (b, c))
    dt, outputs = torch.nn.functional.softplus(dt + bias), []
    for t in range(x.shape[1]):
        state = state * (a * dt[:, t]).exp()[:, :, None, None]
        state = state + torch.einsum("bhp,bhs->bhps", x[:, t] * dt[:, t, :, None], b[:, t])
        outputs.append(torch.einsum("bhps,bhs->bhp", state, c[:, t]) + d[:, None] * x[:, t])
    return torch.stack(outputs, dim=1), state


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("length", [5, 64, 150])
def test_chunks_equal_the_definition(length: int, num_groups: int) -> None:
    torch.manual_seed(0)
    b, c = torch.randn(2, 2, length, num_groups, 6)
    given = [torch.randn(2, length, 4, 8), torch.randn(2, length, 4), -torch.rand(4), b, c]
    given += [torch.randn(4), torch.randn(4), torch.randn(2, 4, 8, 6)]
    upstream = torch.randn(2, length, 4, 8), torch.randn(2, 4, 8, 6)
    found = []
    for dtype in (torch.float64, torch.float32):
        inputs = [x.to(dtype).requires_grad_() for x in given]
        if dtype == torch.float64:
            outputs = by_token(*inputs)
        else:
            d, bias, state = inputs[5:]
            outputs = chunk_scan(
                *inputs[:5],
                D=d,
                dt_bias=bias,
                dt_softplus=True,
                initial_states=state,
                return_final_states=True,
            )
        gradients = torch.autograd.grad(outputs, inputs, [x.to(dtype) for x in upstream])
        found.append([*outputs, *gradients])
    for expected, ours in zip(*found, strict=True):
        # The gradient of A sums differences of both signs.
        assert (ours - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("family", "operator"),
    [
        ("granitemoehybrid", "aten::addcmul"),
        ("nemotron_h", "aten::addcmul"),
        ("falcon_h1", "aten::addcmul"),
        ("qwen3_5", "aten::baddbmm"),
        ("qwen3_next", "aten::baddbmm"),
    ],
)
def test_layers_of_one_model_use_our_scans(family: str, operator: str) -> None:
    changed, other = (AutoModelForCausalLM.from_config(tiny_config(family, 64)).eval() for _ in range(2))
    other.load_state_dict(changed.state_dict())
    use_chunked_scans(changed)
    ids, seen = torch.arange(40)[None], []

    def watch(model: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad(), torch.profiler.profile() as profiler:
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        seen.append({event.key for event in profiler.key_averages()})
        return logits

    torch.testing.assert_close(watch(changed), watch(other), rtol=1e-5, atol=1e-6)
    assert operator in seen[0] - seen[1], "only ours computes the states so"
