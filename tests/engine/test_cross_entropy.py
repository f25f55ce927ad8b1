"""Cross entropy in chunks, of logits and of whole models: same loss and gradient as in one piece, less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers as hf
from fast_models import SHAPE
from torch.utils._python_dispatch import TorchDispatchMode

from crosstune.torch_engine.tasks import token_losses as cross_entropy
from crosstune.torch_engine.tasks.causal_lm import CausalLM
from crosstune.torch_engine.tasks.model_input import ModelInput
from crosstune.torch_engine.tasks.token_losses import cross_entropy_sum


class LargestMade(TorchDispatchMode):
    """Notes the size of the largest fp32 tensor that an operation makes, perhaps only of those with `width` columns."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.size, self.width = 0, width

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                if self.width is not None and tensor.shape[-1:] != (self.width,):
                    continue
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


MODELS: dict[str, Any] = {
    "llama, tied head": lambda: hf.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "capped logits": lambda: hf.Gemma2Config(
        **SHAPE, head_dim=16, final_logit_softcapping=2.0, attn_implementation="eager"
    ),
    "scaled logits": lambda: hf.CohereConfig(**SHAPE, logit_scale=3.0),
    "divided logits": lambda: hf.GraniteConfig(**SHAPE, logits_scaling=0.25),
    "experts": lambda: hf.MixtralConfig(**SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "other names": lambda: hf.GPT2Config(
        vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=128, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_losses_of_tokens_without_the_logits_of_a_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is trained, the head too."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(MODELS[name]())
    ids = torch.randint(3, 97, (4, 64))
    columns, places = torch.arange(8, 64), torch.arange(0, 4 * 56, 2)
    given = ModelInput(
        input_ids=ids, targets=torch.randint(0, 97, (112,)), answers=None, columns=columns, places=places
    )
    logits = model(input_ids=ids, use_cache=False).logits[:, columns].flatten(0, 1)[places]
    expected = F.cross_entropy(logits, given.targets, reduction="none")
    log_probs = logits.log_softmax(-1)
    weights = torch.linspace(-1, 1, 112)
    names, trained = zip(*model.named_parameters(), strict=True)
    wanted = torch.autograd.grad((expected * weights).sum(), trained)
    monkeypatch.setattr(cross_entropy, "LOGITS_AT_A_TIME", 16 * 97)
    with LargestMade(width=97) as largest:
        found, entropies = CausalLM().token_losses(model, given)
        gradients = torch.autograd.grad((found * weights).sum(), trained)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, -(log_probs.exp() * log_probs).sum(-1), rtol=1e-5, atol=1e-5)
    for part, gradient, other in zip(names, gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5, msg=part)
    assert largest.size <= 64 * 97, "of the head and of chunks, not of 112 rows"
    assert "forward" not in vars(model.get_output_embeddings()) and "forward" not in vars(model.base_model)
