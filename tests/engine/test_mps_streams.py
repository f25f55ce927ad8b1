"""The functions that FSDP2 needs and torch.mps lacks, on a device module with only the functions of torch.mps."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the torch extra")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard  # noqa: E402

from crosstune.torch_engine.sharding import staged_backend  # noqa: E402


class Event:
    """Stands for Metal's event, which cannot exist here, with the methods of torch.mps.Event."""

    recorded = 0

    def record(self) -> None:
        Event.recorded += 1

    def synchronize(self) -> None:
        pass


def bare_device() -> Any:
    """The host as a device module with the names of torch.mps that FSDP2 uses."""
    kept = ("is_available", "device_count", "synchronize")
    handle = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in kept}, Event=Event)
    assert all(hasattr(torch.mps, name) for name in ("device_count", "is_available", "synchronize", "Event"))
    assert not hasattr(handle, "Stream")
    return handle


def test_fsdp_runs_on_a_device_without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = bare_device()
    staged_backend.add_streams(handle)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for module in ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state"):
        place = f"torch.distributed.fsdp._fully_shard.{module}._get_device_handle"
        monkeypatch.setattr(place, lambda device_type: handle)
    try:
        for policy in (OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            mesh = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cpu")
            for module in (*model, model):
                fully_shard(module, mesh=mesh, offload_policy=policy)
            plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            plain.load_state_dict({name: t.full_tensor() for name, t in model.state_dict().items()})
            for each in (model, plain):
                each(torch.ones(2, 4)).square().sum().backward()
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.grad.full_tensor(), plain.get_parameter(name).grad)
    finally:
        dist.destroy_process_group()
    assert Event.recorded > 0


def test_kernels_are_registered_for_mps() -> None:
    staged_backend.prepare_mps()
    staged_backend.prepare_mps()
    source = Path(torch.distributed.fsdp.__file__).parent / "_fully_shard" / "_fsdp_collectives.py"
    operators = set(re.findall(r'library\.impl\(lib, "(\w+)"', source.read_text(encoding="utf-8")))
    assert len(operators) >= 3
    for name in operators:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{name}", "MPS"), name
