"""A small model, its training, and the device and group that the tests of MPSFSDPWrapper use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from crosstune.compat.torch_parts import fsdp_model

DEVICE = fsdp_model.find_device().type


@pytest.fixture(autouse=True)
def leave_the_group() -> Iterator[None]:
    yield
    fsdp_model.disconnect()


class Classifier(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)

    def forward(self, ids: Any) -> Any:
        return self.head(self.encoder(self.embed(ids)).mean(1))


def rows(count: int = 8) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 20, (count, 5), generator=generator)
    return ids.to(DEVICE), (ids.sum(1) % 4).to(DEVICE)


def train(model: Any, optimizer: Any, steps: int) -> list[float]:
    losses, (data, target) = [], rows()
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(data), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
