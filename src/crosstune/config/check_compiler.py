"""Check that this machine has what --torch_compile needs."""

from __future__ import annotations

import importlib.util
import os
import shutil

from crosstune.config.plan import Plan
from crosstune.core.errors import UserError

_CPP_COMPILERS = ("g++", "c++", "clang++", "cl")
_WITH_TRITON = ("cuda", "rocm", "xpu")


def check_compiler(plan: Plan) -> None:
    """Raise a UserError if --torch_compile is asked for and cannot work here."""
    missing = missing_compiler(plan.backend.name) if plan.config.torch_compile else None
    if missing is not None:
        raise UserError(
            f"--torch_compile on {plan.backend.name} needs {missing}, which is not here.",
            do=f"install {missing}, or leave --torch_compile out",
        )


def missing_compiler(backend: str) -> str | None:
    """Return what torch.compile lacks on this machine for a backend."""
    if backend == "cpu" and not any(map(shutil.which, (os.environ.get("CXX") or "", *_CPP_COMPILERS))):
        return "a C++ compiler such as g++"
    if backend in _WITH_TRITON and importlib.util.find_spec("triton") is None:
        return "Triton"
    return None
