"""Apple GPUs through PyTorch."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="mps",
    title="Apple GPU",
    engine="torch",
    device="mps",
    torch_build="mps",
    preference=50,
    collective="gloo",
    install=("It needs a Mac with Apple silicon, macOS 12.3 or later and the torch wheel for macOS"),
    environment={
        # Operators without a Metal kernel run on the CPU instead of failing.
        "PYTORCH_ENABLE_MPS_FALLBACK": "1",
        # Fractions of the memory that Metal recommends, since the GPU shares memory with the system.
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO": "0.7",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO": "0.5",
    },
    # Otherwise torch's allocator fails to start.
    at_most={"PYTORCH_MPS_LOW_WATERMARK_RATIO": "PYTORCH_MPS_HIGH_WATERMARK_RATIO"},
    memory_share_variable="PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    # Buffers are cached by size, so rows of many lengths fill the cache.
    clear_cache_every=100,
    # The GPU shares memory with the CPU: there is no copy to speed up.
    pinned_memory=False,
)
