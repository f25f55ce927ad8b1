"""Models that several contract tests quantize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def block() -> Any:
    """A plain torch model."""
    import torch
    from quantization_cases import Block

    torch.manual_seed(0)
    return Block()


@pytest.fixture
def llama(tiny_model: Path) -> Any:
    """The tiny model, loaded by transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model)
