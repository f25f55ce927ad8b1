"""Compile the repeated blocks of a model for training steps: blocks of one kind share a program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError
from crosstune.torch_engine.sharding.local_shard import find_blocks


def compile_blocks(model: nn.Module, plan: Plan) -> list[str]:
    """Compile the blocks in place if --torch_compile is set; return notes for the user.

    Names and parameters do not change. torch compiles in the first step, for rows of any length.
    """
    if not plan.config.torch_compile:
        return []
    blocks = find_blocks(model).values()
    if not blocks:
        return [
            f"torch_compile: nothing is compiled, since {type(model).__name__} has no list of equal blocks"
        ]
    for block in blocks:
        block.compile(dynamic=True)
    return [f"torch_compile: {len(blocks)} blocks are compiled in the first step, which can take minutes"]


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextlib.contextmanager
def without_compiled(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled in the `with` block: evaluation and generation would each need another compilation."""
    if not is_compiled(model):  # otherwise torch's compiler would load, for seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def compile_errors(model: nn.Module) -> Iterator[None]:
    """Convert errors of torch's compiler in the `with` block to a UserError."""
    if not is_compiled(model):
        yield
        return
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    try:
        yield
    except (TorchDynamoException, CppCompileError, InvalidCxxCompiler) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(
            f"--torch_compile does not work with {type(model).__name__} on this machine.",
            why=lines[0] if lines else type(error).__name__,
            do="remove --torch_compile",
        ) from error
