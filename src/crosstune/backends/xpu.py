"""Intel GPUs through PyTorch."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="xpu",
    title="Intel GPU",
    engine="torch",
    device="xpu",
    torch_build="xpu",
    overhead_bytes=512 * 2**20,
    preference=30,
    collective="xccl",
    visible_devices="ZE_AFFINITY_MASK",
    install=(
        "It needs an Intel GPU with its driver and an XPU build of torch (https://pytorch.org/get-started)"
    ),
)
