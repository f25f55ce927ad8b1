"""Compile the repeated blocks of a model for the steps of a training: one program serves all blocks of a kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core.errors import UserError


def compile_blocks(model: nn.Module, plan: Plan) -> list[str]:
    """Compile the blocks in place, if the config asks for it, and return sentences about it. Names and parameters stay as
    they are; the program is made in the first steps, for rows of any length."""
    if not plan.config.torch_compile:
        return []
    blocks = repeated_blocks(model)
    if not blocks:
        return [
            f"torch_compile: nothing is compiled, since {type(model).__name__} has no list of equal blocks"
        ]
    for block in blocks:
        block.compile(dynamic=True)
    return [
        f"torch_compile: the first step takes up to minutes longer, while {len(blocks)} blocks are compiled"
    ]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in lists of at least two modules of one class, leaving out lists inside of others."""
    found: list[nn.Module] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(one) for one in module}) == 1:
            found += list(module)
            inside = (*inside, f"{name}.")
    return found


def is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in model.modules())


@contextlib.contextmanager
def without_compiled(model: nn.Module) -> Iterator[None]:
    """Run the model uncompiled inside the block: evaluations and answers have other shapes, and each kind of pass would be
    compiled once more."""
    if not is_compiled(model):  # the other case loads torch's compiler, which takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def compile_errors(model: nn.Module) -> Iterator[None]:
    """Turn errors of torch's compiler inside the block into a UserError."""
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
            do="leave --torch_compile out",
        ) from error
