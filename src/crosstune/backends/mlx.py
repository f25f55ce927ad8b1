"""Apple's own framework: Apple GPUs through unified memory, and for tests any processor."""

from __future__ import annotations

from crosstune.core.backend import BackendSpec

SPEC = BackendSpec(
    name="mlx",
    title="Apple MLX",
    engine="mlx",
    device="gpu",
    preference=40,
    collective="ring",
    # What one command buffer uses stays in memory until the buffer is done, and on CUDA MLX puts a gigabyte and more
    # into one: a quarter of a step's memory and more. On Metal it commits them earlier of itself.
    environment_on={"Linux": {"MLX_MAX_MB_PER_BUFFER": "100"}},
    install=(
        "It needs its framework: pip install 'crosstune[mlx]' on a Mac with Apple silicon, "
        "or pip install 'mlx[cpu]' mlx-lm to try it on a Linux processor; otherwise use --backend auto"
    ),
)
