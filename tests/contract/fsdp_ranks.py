"""Train with the wrapper in one of several processes; started by test_guide_mps_fsdp.py with torchrun or by hand.

Arguments: the sharding strategy, a folder, the first step and the one after the last; a checkpoint in the folder is
continued. With STAGED set, host tensors take the path of a device that gloo does not know.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from crosstune.compat.torch_parts import fsdp_model
from crosstune.torch_engine.sharding.staged_backend import NAME, register_staged_backend
from mps_fsdp_wrapper import create_mps_fsdp_wrapper


class Scaled(nn.Module):
    """A small transformer with a scalar and a buffer, which FSDP2 does not shard."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 2, 40, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(31, 24)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 31)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("shift", torch.full((24,), 0.1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids)) * self.scale + self.shift)


def batch(step: int, *, rank: int, size: int) -> torch.Tensor:
    """Return this rank's rows of a batch of twelve that is the same at every number of processes."""
    rows = torch.randint(0, 31, (12, 6), generator=torch.Generator().manual_seed(step % 3))
    return rows[rank::size]


def stage_everything() -> None:
    register_staged_backend(stage_host=True)
    fsdp_model.open_group = lambda device, ranks=None: dist.new_group(ranks, backend=NAME)


def main(strategy: str, folder: str, first: str, last: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size > 1:
        dist.init_process_group(backend="gloo", init_method="env://", world_size=size, rank=rank)
    if os.environ.get("STAGED"):
        stage_everything()
    wrapper = create_mps_fsdp_wrapper(
        world_size=size, rank=rank, sharding_strategy=strategy, mixed_precision=False
    )
    torch.manual_seed(rank)  # rank 0's weights are used everywhere
    model = wrapper.wrap_transformer(Scaled(), transformer_layer_cls=nn.TransformerEncoderLayer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    path = Path(folder) / "last.pt"
    if path.exists():
        assert wrapper.load_checkpoint(model, path, optimizer=optimizer)["step"] == int(first)
    losses = []
    for step in range(int(first), int(last)):
        ids = batch(step, rank=rank, size=size).to(wrapper.device)
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.ndim], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().cpu()
        dist.all_reduce(total)
        losses.append(float(total) / size)
    wrapper.save_checkpoint(model, path, optimizer=optimizer, step=int(last))
    if rank == 0:  # what each of them holds
        held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())
        Path(folder, "result.json").write_text(
            json.dumps({"losses": losses, "share": held / whole}), encoding="utf-8"
        )
    dist.barrier()  # rank 0 must not end before the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
