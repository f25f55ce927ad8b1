"""A model folder to a torch model on its device, in the number formats of the plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from crosstune.config.plan import Plan
from crosstune.core.errors import UserError
from crosstune.torch_engine.precision import Precision


def load_model(folder: Path, *, plan: Plan, precision: Precision, device: torch.device) -> nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=precision.weights,
            attn_implementation=attention_name(plan),
            trust_remote_code=False,
            local_files_only=True,
        )
    except (ValueError, KeyError, OSError) as error:
        raise UserError(
            f"transformers cannot load the model in {folder}.",
            why=" ".join(str(error).split())[:400],
            do="check that it is a causal language model and that its files are complete",
        ) from error
    if precision.buffers is not None:
        _cast_buffers(model, precision.buffers)
    return model.to(device)


def attention_name(plan: Plan) -> str:
    """torch's own attention picks flash kernels by itself; eager is for those who forbid them."""
    return "eager" if plan.config.use_flash_attention is False and plan.backend.name == "cuda" else "sdpa"


def shrink_frozen(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Keep frozen linear weights in the type autocast would turn them into at each use: same values, half the memory."""
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if (
            isinstance(module, nn.Linear)
            and not module.weight.requires_grad
            and id(module.weight) not in shared
        ):
            module.to(dtype)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
