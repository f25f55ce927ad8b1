"""A Hugging Face folder rewritten for mlx-lm, and the logits of what was written."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosstune.core.errors import UserError

BITS = (2, 3, 4, 5, 6, 8, 16)
"""16: the weights stay as they are."""
GROUP_SIZES = (32, 64, 128)


def require_mlx() -> None:
    if importlib.util.find_spec("mlx_lm") is None:
        raise UserError(
            "Cannot write a model for MLX.",
            why="the Python package mlx-lm is not installed.",
            do="pip install 'crosstune[mlx]'",
        )


def convert_folder(source: Path, target: Path, *, bits: int, group_size: int) -> None:
    """`target` must not exist yet."""
    require_mlx()
    if bits not in BITS:
        raise UserError(f"MLX has no {bits} bits.", do=f"use --n_bits {', '.join(map(str, BITS))}")
    if group_size not in GROUP_SIZES:
        raise UserError(
            f"MLX has no groups of {group_size} weights.",
            do=f"use --group_size {', '.join(map(str, GROUP_SIZES))}",
        )
    from mlx_lm.convert import convert

    try:
        # mlx-lm tells its progress on standard output, which belongs to our own result.
        with contextlib.redirect_stdout(sys.stderr):
            convert(
                str(source),
                str(target),
                quantize=bits != 16,
                q_bits=bits if bits != 16 else None,
                q_group_size=group_size if bits != 16 else None,
            )
    except ValueError as error:
        raise UserError(f"mlx-lm cannot convert {source}.", why=str(error)) from error


def folder_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
    """Logits of a folder as mlx-lm loads it."""
    require_mlx()
    import mlx.core as mx
    from mlx_lm import load

    model = load(str(folder))[0]
    found = []
    for prompt in prompts:
        logits = model(mx.array([list(prompt)]))[0].astype(mx.float32)
        found.append(np.array(logits))
    return found
