"""How far two models are apart: their logits on a few prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crosstune.torch_engine.load import readable_errors
from crosstune.torch_engine.precision import Precision
from crosstune.torch_engine.session import TorchSession

Logits = list[NDArray[np.float32]]
Prompts = Sequence[Sequence[int]]

# Largest `relative` that rounding explains, by the coarsest number format on either side. A wrong layout, scale or
# rotation gives values near 1.
BOUNDS = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1, "q8_0": 0.1, "8": 0.15, "6": 0.3, "5": 0.5, "4": 0.8}


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """`relative` is the norm of the difference over that of the reference, both without what softmax ignores."""

    max_abs: float
    mean_kl: float
    top1: float
    relative: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def compare(reference: Logits, other: Logits) -> Agreement:
    """Over every position of every prompt; the divergence is that of `other` from `reference`, in nats."""
    max_abs, kl, same, count = 0.0, 0.0, 0, 0
    squared_difference, squared_reference = 0.0, 0.0
    for expected, found in zip(reference, other, strict=True):
        assert expected.shape == found.shape, (expected.shape, found.shape)
        ours, theirs = expected.astype(np.float64), found.astype(np.float64)
        max_abs = max(max_abs, float(np.abs(ours - theirs).max()))
        p, q = _log_softmax(ours), _log_softmax(theirs)
        kl += float((np.exp(p) * (p - q)).sum())
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        count += len(ours)
        centred = ours - ours.mean(-1, keepdims=True)
        squared_difference += float(((theirs - theirs.mean(-1, keepdims=True) - centred) ** 2).sum())
        squared_reference += float((centred**2).sum())
    return Agreement(
        max_abs=max_abs,
        mean_kl=max(0.0, kl / count),
        top1=same / count,
        relative=(squared_difference / squared_reference) ** 0.5 if squared_reference else 0.0,
    )


def session_logits(session: TorchSession, prompts: Prompts) -> Logits:
    """Logits of a model as it was trained, in the number formats of its training."""
    session.model.eval()
    return model_logits(session.model, prompts, precision=session.precision, device=session.device)


def folder_logits(
    folder: Path, prompts: Prompts, *, precision: Precision, device: torch.device, gguf: str | None = None
) -> Logits:
    """Logits of a folder as transformers loads it; `gguf` is the name of a GGUF file in it."""
    model = load_plainly(folder, precision=precision, device=device, gguf=gguf)
    return model_logits(model, prompts, precision=precision, device=device)


def load_plainly(folder: Path, *, precision: Precision, device: torch.device, gguf: str | None = None) -> Any:
    """The model as anyone would load it with transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    extra = {"gguf_file": gguf} if gguf else {}
    with readable_errors(folder):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=precision.weights, trust_remote_code=False, local_files_only=True, **extra
        )
    return model.to(device).eval()


@torch.no_grad()
def replace_weights(model: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Another set of weights in a loaded model; names it does not have (of tied weights) are passed over."""
    own = model.state_dict()
    for name, tensor in tensors:
        if name in own:
            own[name].copy_(tensor)


@torch.inference_mode()
def model_logits(model: Any, prompts: Prompts, *, precision: Precision, device: torch.device) -> Logits:
    found = []
    for prompt in prompts:
        with precision.context(device):
            ids = torch.tensor([list(prompt)], device=device)
            found.append(model(input_ids=ids).logits[0].float().cpu().numpy())
    return found


def _log_softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = values - values.max(-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result
