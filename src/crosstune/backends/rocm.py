"""AMD GPUs through PyTorch, which also calls them `cuda`."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="rocm",
    title="AMD GPU",
    engine="torch",
    device="cuda",
    torch_build="hip",
    overhead_bytes=512 * 2**20,
    preference=20,
    collective="nccl",
    pinned_memory=True,
    visible_devices="HIP_VISIBLE_DEVICES",
    install=(
        "It needs an AMD GPU with its driver and a ROCm build of torch (https://pytorch.org/get-started)"
    ),
)
