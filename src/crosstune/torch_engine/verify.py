"""Compute logits on a few prompts, of a trained model and of a folder loaded by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.quiet import hide_output
from crosstune.torch_engine.load import readable_errors
from crosstune.torch_engine.precision import Precision
from crosstune.torch_engine.sharding.gathered import without_gradients


def load_plainly(folder: Path, precision: Precision, *, device: torch.device, gguf: str | None = None) -> Any:
    """Load a folder, or the GGUF file `gguf` in it, with transformers alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    extra = {"gguf_file": gguf} if gguf else {}
    with readable_errors(folder), hide_output():  # for GGUF files transformers draws a bar
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=precision.weights, trust_remote_code=False, local_files_only=True, **extra
        )
    return model.to(device).eval()


@torch.no_grad()
def replace_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Replace the weights of a loaded model; names it does not have (tied weights) are skipped."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name in state:
            state[name].copy_(tensor)


def model_logits(model: Any, prompts: Prompts, *, precision: Precision, device: torch.device) -> Logits:
    """Return the logits at every position of each prompt, in fp32."""
    found = []
    for prompt in prompts:
        with without_gradients(model), precision.context(device):
            ids = torch.tensor([list(prompt)], device=device)
            found.append(model(input_ids=ids).logits[0].float().cpu().numpy())
    return found
