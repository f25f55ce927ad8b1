"""NVIDIA GPUs through PyTorch."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="cuda",
    title="NVIDIA GPU",
    engine="torch",
    device="cuda",
    torch_build="cuda",
    overhead_bytes=512 * 2**20,
    preference=10,
    collective="nccl",
    pinned_memory=True,
    visible_devices="CUDA_VISIBLE_DEVICES",
    install=(
        "It needs an NVIDIA GPU with its driver and a CUDA build of torch (https://pytorch.org/get-started)"
    ),
)
