"""Open the torch device of a backend, choose dtypes by precision, manage memory, compile blocks, and preserve the state of the
process."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from crosstune.config.resolve.plan import Plan
from crosstune.core import out_of_memory
from crosstune.core.errors import UserError
from crosstune.core.protocols import Memory
from crosstune.estimate.machine import BackendReport
from crosstune.torch_engine.session.state import separate_random
from crosstune.torch_engine.sharding.local_shard import find_blocks


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a run."""

    weights: torch.dtype
    """The dtype of the weights in memory. Trained parameters also have fp32 masters."""
    autocast: torch.dtype | None = None
    buffers: torch.dtype | None = None

    def context(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context of a pass."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, dtype=self.autocast)


PRECISIONS = {
    "fp32": Precision(weights=torch.float32),
    "bf16": Precision(weights=torch.bfloat16),
    "fp16": Precision(weights=torch.float16),
    "bf16_autocast": Precision(weights=torch.float32, autocast=torch.bfloat16),
    "fp16_autocast": Precision(weights=torch.float32, autocast=torch.float16),
    "bf16_buffers_autocast": Precision(
        weights=torch.float32, autocast=torch.bfloat16, buffers=torch.bfloat16
    ),
}


def open_device(report: BackendReport) -> torch.device:
    """Return the device of a backend, with a new memory peak if it has its own memory."""
    device = torch.device(report.device)
    if _memory_module(device) is not None:
        reset_peak(device)
    return device


def reset_peak(device: torch.device) -> None:
    """Reset the memory peak of the device, or of the process for a CPU (on Linux only)."""
    module = _memory_module(device)
    if module is not None and hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()
    elif device.type == "cpu":
        release_freed_memory()
        with contextlib.suppress(OSError):  # not Linux, or forbidden in a container
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def read_memory(device: torch.device) -> Memory:
    """Return current and peak bytes of the device; for a CPU, of the process."""
    module = _memory_module(device)
    if module is not None and hasattr(module, "max_memory_allocated"):
        return Memory(used_bytes=module.memory_allocated(), peak_bytes=module.max_memory_allocated())
    if device.type == "mps":
        used = torch.mps.driver_allocated_memory()
        return Memory(used_bytes=used, peak_bytes=used)
    return Memory(used_bytes=psutil.Process().memory_info().rss, peak_bytes=_peak_resident_bytes())


def memory_errors(
    device: torch.device, *, doing: str = out_of_memory.STEP
) -> contextlib.AbstractContextManager[None]:
    """Convert every out-of-memory error to OutOfMemory, after releasing cached memory."""
    return out_of_memory.memory_errors(doing=doing, release=lambda: clear_cache(device))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, without compiled blocks, and restore its mode on exit."""
    training = model.training
    model.eval()
    try:
        with without_compiled(model):
            yield
    finally:
        model.train(training)


def clear_cache(device: torch.device) -> None:
    """Release the memory that torch has cached."""
    module = torch.get_device_module(device)
    if hasattr(module, "empty_cache"):  # torch.cpu has no cache
        module.empty_cache()


def release_freed_memory() -> None:
    """Make glibc return freed memory to the system; otherwise it keeps several times the memory in use while a model loads."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # only glibc has it
        trim(0)


def _memory_module(device: torch.device) -> Any:
    return None if device.type in ("cpu", "mps") else torch.get_device_module(device)


def _peak_resident_bytes() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Restore the random state and transformers' logging on exit."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Reading the random state of an accelerator would initialize it.
    if device is None or not getattr(torch.get_device_module(device), "is_initialized", lambda: True)():
        device = torch.device("cpu")
    with separate_random(device), _keep_logging():
        yield


@contextlib.contextmanager
def _keep_logging() -> Iterator[None]:
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
