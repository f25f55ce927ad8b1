"""Cross entropy in parts: the loss and gradient of doing it at once, and less memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from crosstune.torch_engine.tasks import causal_lm as cross_entropy
from crosstune.torch_engine.tasks.causal_lm import cross_entropy_sum


class LargestMade(TorchDispatchMode):
    """Notes the size of the largest fp32 tensor that an operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.size = max(self.size, tensor.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_parts_equal_the_whole(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(rows, 33)).to(dtype)
    targets = torch.randint(0, 33, (rows,))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, reduction="sum")
    (expected * 0.37).backward()
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_A_TIME", 5 * 33)
    parts = logits.clone().requires_grad_()
    found = cross_entropy_sum(parts, targets)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-5)
    (found * 0.37).backward()
    assert parts.grad is not None and parts.grad.dtype == dtype
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(parts.grad.double(), exact.grad, rtol=bound, atol=bound)


def test_nothing_is_kept_when_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_A_TIME", 10)
    logits, targets = torch.randn(8, 5), torch.arange(5).repeat(2)[:8]
    with torch.no_grad(), LargestMade() as largest:
        found = cross_entropy_sum(logits, targets)
    assert not found.requires_grad
    assert largest.size == 10  # the logits of one part, and no room for a gradient of all 40
    assert float(found) == pytest.approx(float(F.cross_entropy(logits, targets, reduction="sum")), rel=1e-5)


def test_parts_make_no_fp32_copy_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch itself: the largest tensor that is made in fp32."""
    logits = torch.randn(64, 50).bfloat16().requires_grad_()
    targets = torch.randint(0, 50, (64,))
    sizes = {}
    for limit in (64 * 50, 8 * 50):
        monkeypatch.setattr(cross_entropy, "LOGITS_AT_A_TIME", limit)
        with LargestMade() as largest:
            cross_entropy_sum(logits, targets).backward()
        sizes[limit] = largest.size
    assert sizes == {64 * 50: 64 * 50, 8 * 50: 8 * 50}
