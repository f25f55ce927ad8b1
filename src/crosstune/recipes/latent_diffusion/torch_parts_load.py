"""Load the weights of a trained latent-diffusion model."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError

from crosstune.core.check_shapes import check_fit
from crosstune.core.errors import UserError
from crosstune.recipes.latent_diffusion.settings import ModelSettings
from crosstune.recipes.latent_diffusion.torch_parts_device import choose_device
from crosstune.recipes.latent_diffusion.torch_parts_model import LatentDiffusionModel
from crosstune.recipes.latent_diffusion.torch_parts_sampling import Sampler
from crosstune.torch_engine.stream import find_tensors, read_tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def load_sampler(folder: Path, settings: ModelSettings, *, device: str | None, dtype: str) -> Sampler:
    """Return a sampler over the weights of a folder, on the GPU if there is one."""
    target = choose_device(device)
    with torch.device("meta"):
        model = LatentDiffusionModel(settings, compute_dtype=DTYPES[dtype])
    try:
        tensors = {name: read_tensor(place) for name, place in find_tensors(folder).items()}
    except SafetensorError as error:
        raise UserError(f"The weights of {folder} are damaged.", why=f"{error}.") from error
    check_fit(
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: tensor.numpy() for name, tensor in tensors.items()},
    )
    model.load_state_dict(tensors, assign=True)
    return Sampler(model.to(target, DTYPES[dtype]).eval().requires_grad_(False))
