"""Apple GPUs through MLX, and any CPU for tests."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="mlx",
    title="Apple MLX",
    engine="mlx",
    device="gpu",
    preference=40,
    collective="ring",
    # A command buffer keeps the arrays it uses in memory until it completes. On CUDA, MLX puts a gigabyte or more into
    # one, a quarter of a step's memory; on Metal it commits buffers earlier.
    environment_on={"Linux": {"MLX_MAX_MB_PER_BUFFER": "100"}},
    install=(
        "It needs MLX: pip install 'crosstune[mlx]' on a Mac with Apple silicon, "
        "or pip install 'mlx[cpu]' mlx-lm to try it on a Linux CPU"
    ),
)
