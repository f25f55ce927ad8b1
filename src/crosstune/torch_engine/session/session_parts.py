"""Define the parts of an opened model, which a session is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from crosstune.torch_engine.device import CacheClearing
from crosstune.torch_engine.loading.adapters import Adapted
from crosstune.torch_engine.session.optimizer import Masters
from crosstune.torch_engine.task import BuildContext, TorchTask

if TYPE_CHECKING:
    from crosstune.torch_engine.sharding.parallel import Parallel


@dataclass(kw_only=True)
class Parts:
    """The parts of an opened model."""

    opening: BuildContext
    task: TorchTask
    model: nn.Module
    adapters: dict[str, Adapted]
    masters: Masters
    optimizer: torch.optim.Optimizer | None
    """None if the model is only evaluated."""
    cache: CacheClearing
    pin_memory: bool = False
    parallel: Parallel | None = None
    """None for a single process."""
    notes: Sequence[str] = ()
    """Decisions made while opening the model, for the user."""
