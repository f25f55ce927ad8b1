"""Probe what a torch backend supports on this machine."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence
from typing import Any

from crosstune.backends._host import memory_bytes, processor_device, processor_name
from crosstune.core.backend import BackendSpec
from crosstune.core.names import plugin_names
from crosstune.estimate.machine import BackendReport, Device
from crosstune.torch_engine.import_transformers import without_collecting

_BUILD_TITLES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "Intel XPU", "mps": "Apple MPS"}


def probe(spec: BackendSpec, *, quantizers: Sequence[str] = ()) -> BackendReport:
    """Probe a backend and the given quantizers; skip quantizers that the torch engine does not support."""
    reason = _why_missing(spec)
    if reason:
        return _missing(spec, reason)
    from crosstune.torch_engine import capabilities

    notes: list[str] = []
    dtypes = capabilities.working_dtypes(spec.device, notes=notes)
    if "fp32" not in dtypes:
        return _missing(spec, "; ".join(notes))
    devices, unified = _devices(spec.device)
    dtype = capabilities.DTYPES[next(name for name in ("bf16", "fp16", "fp32") if name in dtypes)]
    known = [name for name in quantizers if name in plugin_names(capabilities.QUANT_PACKAGE)]
    bits = {name: capabilities.working_bits(name, spec.device, dtype, notes=notes) for name in known}
    collectives = capabilities.working_collectives(spec.device, notes=notes)
    return BackendReport(
        name=spec.name,
        engine=spec.engine,
        available=True,
        device=spec.device,
        devices=devices,
        unified_memory=unified,
        dtypes=dtypes,
        bf16_speedup=capabilities.bf16_speedup(spec.device) if "bf16" in dtypes else 1.0,
        quantizers={name: widths for name, widths in bits.items() if widths},
        collectives=tuple(sorted(collectives, key=lambda name: name != spec.collective)),
        attention=capabilities.working_attention(spec.device, dtype, notes=notes),
        has_triton=spec.device != "cuda" or capabilities.runs_triton(spec.device, notes=notes),
        notes=_merge(notes),
    )


def torch_device(name: str) -> Any:
    """Return the torch.device of this name."""
    import torch

    return torch.device(name)


def torch_dtype(name: str) -> Any:
    """Return the torch.dtype of fp32, fp16 or bf16."""
    from crosstune.torch_engine.capabilities import DTYPES

    return DTYPES[name]


def allocated_bytes(device: str) -> tuple[int, int]:
    """Return the bytes this process has allocated and reserved on the first device."""
    import torch

    module = torch.get_device_module(device)
    if hasattr(module, "memory_reserved"):
        return module.memory_allocated(), module.memory_reserved()
    if hasattr(module, "driver_allocated_memory"):
        return module.current_allocated_memory(), module.driver_allocated_memory()
    return 0, 0


def _missing(spec: BackendSpec, reason: str) -> BackendReport:
    return BackendReport(
        name=spec.name, engine=spec.engine, available=False, reason=reason, device=spec.device
    )


def _why_missing(spec: BackendSpec) -> str:
    """Return why torch cannot use the backend; an empty string if it can."""
    try:
        with without_collecting():
            import torch
    except ModuleNotFoundError as error:
        return "torch is not installed" if error.name == "torch" else f"torch does not import: {error}"
    except (ImportError, OSError) as error:
        return f"torch does not import: {error}"
    if spec.torch_build and not _is_built(spec.torch_build):
        return _why_not_built(spec)
    try:
        module = torch.get_device_module(spec.device)
    except (RuntimeError, AttributeError):
        return f"torch {torch.__version__} does not support the device '{spec.device}'"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # torch.mps has no is_available() before torch 2.7.
        backend = module if hasattr(module, "is_available") else getattr(torch.backends, spec.device)
        available = backend.is_available()
    if available:
        return ""
    warning = f" ({str(caught[0].message).splitlines()[0]})" if caught else ""
    return f"no {spec.title} or driver was found{warning}"


def _is_built(build: str) -> bool:
    import torch

    if hasattr(torch.version, build):
        return getattr(torch.version, build) is not None
    backend = getattr(torch.backends, build, None)
    return backend is not None and bool(backend.is_built())


def _why_not_built(spec: BackendSpec) -> str:
    import torch

    if not hasattr(torch.version, spec.torch_build):  # needs another kind of computer, not another wheel
        return (
            f"this torch build lacks {spec.torch_build} support ({platform.system()}, {platform.machine()})"
        )
    built = [title for build, title in _BUILD_TITLES.items() if _is_built(build)]
    title = _BUILD_TITLES.get(spec.torch_build, spec.torch_build)
    return f"this torch was built for {built[0]}, not {title}" if built else "this torch is a CPU build"


def _devices(device: str) -> tuple[tuple[Device, ...], bool]:
    """Return the devices, and whether they share memory with the host."""
    import torch

    if device == "cpu":
        return (processor_device(),), False
    module = torch.get_device_module(device)
    if hasattr(module, "recommended_max_memory"):
        total = module.recommended_max_memory()
        free = max(0, min(total - module.driver_allocated_memory(), memory_bytes()[1]))
        return (Device(name=processor_name(), memory_total_bytes=total, memory_free_bytes=free),), True
    properties = [module.get_device_properties(index) for index in range(module.device_count())]
    devices = tuple(
        Device(
            name=item.name,
            memory_total_bytes=item.total_memory,
            memory_free_bytes=_free_bytes(module, index, item.total_memory),
        )
        for index, item in enumerate(properties)
    )
    return devices, any(bool(getattr(item, "is_integrated", False)) for item in properties)


def _free_bytes(module: Any, index: int, total: int) -> int:
    """Return free memory; for other devices than the current one, as the driver's library reports it.

    `mem_get_info` would open a context on another device, at hundreds of megabytes per process.
    """
    if index == module.current_device():
        return int(module.mem_get_info(index)[0])
    try:
        return int(total - module.device_memory_used(index))
    except (ImportError, RuntimeError, AttributeError):
        return int(total)


def _merge(notes: Sequence[str]) -> tuple[str, ...]:
    """Join notes with the same reason, such as a missing library at every bit width."""
    merged: dict[str, list[str]] = {}
    for note in notes:
        what, colon, why = note.partition(": ")
        merged.setdefault(why if colon else what, []).extend([what] * bool(colon))
    return tuple(f"{', '.join(whats)}: {why}" if whats else why for why, whats in merged.items())
