"""Train a small model with FSDP2 in one rank and write the losses; started by test_staged_backend.py with torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from crosstune.torch_engine.sharding.staged_backend import register_staged_backend


def main(backend: str, device: str, out: str) -> None:
    if backend != "gloo":
        register_staged_backend(backend, stage_host=True)
    if device == "cuda":
        torch.cuda.set_device(0)  # both ranks share the one device
    dist.init_process_group(backend)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(33, 33), nn.GELU()) for _ in range(4)), nn.Linear(33, 5))
    mesh = DeviceMesh.from_group(dist.group.WORLD, device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step % 2 + 2 * dist.get_rank())
        x = torch.randn(6, 33, generator=generator).to(device)
        loss = (model(x) - x[:, :5]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        both = loss.detach().clone()
        dist.all_reduce(both)
        losses += [float(both), float(norm.full_tensor())]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses[::2]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
