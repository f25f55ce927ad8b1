"""Models and configurations that the tests of the guides' quantization_wrapper share.

Importing it skips a test file where torch or a quantizer is not installed.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the guides' adapters quantize torch models")
pytest.importorskip("bitsandbytes", reason="an extra: pip install 'crosstune[bnb]'")
pytest.importorskip("hqq", reason="an extra: pip install 'crosstune[hqq]'")
pytest.importorskip("optimum.quanto", reason="an extra: pip install 'crosstune[quanto]'")

from torch import nn  # noqa: E402

from crosstune.torch_engine.quantized import QuantLinear  # noqa: E402
from quantization_wrapper import (  # noqa: E402
    BitsAndBytesAdapter,
    FallbackAdapter,
    HQQAdapter,
    QuantizationMethod,
    QuantoAdapter,
)

M = QuantizationMethod
# Largest relative error of weights drawn from a normal distribution, and bits per weight with the scales.
REAL = [
    (BitsAndBytesAdapter, {"method": M.BNB_NF4}, 0.11, 4.3),
    (BitsAndBytesAdapter, {"method": M.BNB_NF4, "double_quant": False}, 0.11, 4.7),
    (BitsAndBytesAdapter, {"method": M.BNB_NF4, "quant_type": "fp4", "block_size": 128}, 0.2, 4.2),
    (BitsAndBytesAdapter, {"method": M.BNB_INT8}, 0.02, 8.3),
    (HQQAdapter, {"method": M.HQQ_4BIT}, 0.12, 4.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 8}, 0.01, 8.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 3, "quant_zero": False}, 0.25, 4.6),
    (HQQAdapter, {"method": M.HQQ, "bits": 2, "group_size": 32, "quant_scale": True}, 0.5, 2.8),
    (HQQAdapter, {"method": M.HQQ, "bits": 1}, 1.2, 1.8),
    (QuantoAdapter, {"method": M.QUANTO_INT8}, 0.015, 8.3),
    (QuantoAdapter, {"method": M.QUANTO_INT8, "quant_type": "float8"}, 0.04, 8.3),
    (QuantoAdapter, {"method": M.QUANTO_INT4, "group_size": 32}, 0.12, 6.1),
    (QuantoAdapter, {"method": M.QUANTO_INT2}, 0.6, 3.1),
    (FallbackAdapter, {"method": M.NONE}, 0.003, 16.0),
]
IDS = ["-".join(str(getattr(value, "value", value)) for value in case[1].values()) for case in REAL]
ADAPTERS = [REAL[place][:2] for place in (0, 3, 7, 10, 11, 13)]
"""One case of each library's storage formats."""


class Block(nn.Module):
    """A plain torch model with a bias, a head, and torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.leave = nn.Linear(128, 64, bias=False)
        self.lm_head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.enter(x))
        x = x + self.attention(x, x, x)[0]
        return self.lm_head(self.leave(x))


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def relative_error(result: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(
        (result.detach().double() - wanted.detach().double()).norm() / wanted.detach().double().norm()
    )


def inputs() -> torch.Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
