"""The estimated activations of a latent-diffusion model against the tensors that autograd keeps."""

from __future__ import annotations

import pytest
import torch

from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel


@pytest.mark.parametrize(("hidden", "blocks", "rows"), [(64, 2, 32), (128, 5, 8)])
@pytest.mark.parametrize("longest", [8, 24])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations(hidden: int, blocks: int, rows: int, longest: int, recompute: bool) -> None:
    settings = ModelSettings(
        vocabulary=100,
        max_tokens=32,
        latent_dim=16,
        hidden_size=hidden,
        n_blocks=blocks,
        n_heads=4,
        cond_dim=hidden,
        latent_tokens=4,
    )
    model = LatentDiffusionModel(settings).train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    lengths = torch.arange(rows) % 5 + 4
    lengths[0] = longest
    tokens = torch.zeros(rows, longest, dtype=torch.long)
    is_real = torch.arange(longest) < lengths[:, None]
    real = (is_real.nonzero()[:, 0], is_real.flatten().nonzero()[:, 0])
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    tensors = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            tensors.append(tensor)  # an address may be used again
        return tensor

    latents, time = torch.zeros(rows, 16), torch.full((rows,), 0.5)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(tokens, lengths, latents, time, time, real=real)
    assert output.logits is not None
    mean = float(lengths.float().mean())
    found = settings.activation_bytes(rows, mean_tokens=mean, longest=longest, width=4, recompute=recompute)
    logits = 12 * rows * mean * settings.vocabulary  # kept by the loss, which is not computed here
    if recompute:  # a block is recomputed one at a time
        whole = settings.activation_bytes(rows, mean_tokens=mean, longest=longest, width=4, recompute=False)
        assert found - logits == pytest.approx(sum(kept.values()) + (whole - logits) / blocks, rel=0.25)
    else:
        assert found - logits == pytest.approx(sum(kept.values()), rel=0.25)
