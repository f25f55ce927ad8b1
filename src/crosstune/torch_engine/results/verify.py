"""Compute logits of a trained model, of a folder loaded by transformers, or with the original base weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from crosstune.core.logit_distance import Logits, Prompts
from crosstune.models.folder import readable_errors
from crosstune.process.this_process import hide_output
from crosstune.torch_engine.device import Precision
from crosstune.torch_engine.loading.blocks import Expansion
from crosstune.torch_engine.loading.load import model_kind, read_config
from crosstune.torch_engine.loading.stream import Place, find_tensors, read_tensor
from crosstune.torch_engine.quantized import QuantLinear
from crosstune.torch_engine.sharding.local_shard import without_gradients

_PASS_TOKENS = 512


def load_plainly(folder: Path, precision: Precision, *, device: torch.device, gguf: str | None = None) -> Any:
    """Load a folder, or the GGUF file `gguf` in it, with transformers alone."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # transformers would prefer a file of that name in the working directory.
    extra = {"gguf_file": str((folder / gguf).absolute())} if gguf else {}
    with readable_errors(folder), hide_output():  # transformers shows a progress bar for GGUF files
        kind = AutoModelForCausalLM if gguf else model_kind(read_config(folder))
        model = kind.from_pretrained(
            folder, dtype=precision.weights, trust_remote_code=False, local_files_only=True, **extra
        )
    return model.to(device).eval()


@torch.no_grad()
def replace_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy weights into a loaded model, except names that it does not have (tied weights)."""
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name in state:
            state[name].copy_(tensor)


def model_logits(model: Any, prompts: Prompts, *, precision: Precision, device: torch.device) -> Logits:
    """Return the logits at every position of each prompt, in fp32. Prompts share a pass, padded at their end, where a causal
    model does not look."""
    found = []
    for group in passes(prompts):
        longest = max(map(len, group))
        rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in group]
        with without_gradients(model), precision.context(device):
            logits = model(input_ids=torch.tensor(rows, device=device)).logits
        found += [row[: len(prompt)].float().cpu().numpy() for row, prompt in zip(logits, group, strict=True)]
    return found


def passes(rows: Prompts, *, padded: bool = True) -> Iterator[Prompts]:
    """Split rows into groups of at most _PASS_TOKENS tokens, or one row; without `padded`, of one length."""
    group: list[Sequence[int]] = []
    for row in rows:
        tokens = (len(group) + 1) * max(len(row), *map(len, group)) if group else 0
        if tokens > _PASS_TOKENS or (group and not padded and len(row) != len(group[0])):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


@contextlib.contextmanager
def original_weights(model: nn.Module, folder: Path, expansion: Expansion) -> Iterator[None]:
    """Read the unquantized weights of the base folder at each use in the `with` block, in a model that was expanded from it."""
    places = {
        target: place for name, place in find_tensors(folder).items() for target, _ in expansion.names(name)
    }
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    try:
        for name, layer in layers.items():
            read = partial(_read, places[f"{name}.weight"], layer.stored.packed.device)
            layer.stored.dequantize = read  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers.values():
            layer.stored.__dict__.pop("dequantize", None)


def _read(place: Place, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return read_tensor(place).to(device, dtype)
