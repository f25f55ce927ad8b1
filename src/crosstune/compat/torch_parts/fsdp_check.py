"""Check by trials which features of MPSFSDPWrapper work on this machine."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
import torch.distributed as dist

from crosstune.compat.torch_parts.fsdp_groups import connect_alone, disconnect
from crosstune.compat.torch_parts.fsdp_model import find_device, fsdp_problem
from crosstune.torch_engine.capabilities import working_dtypes

FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"


def check_machine() -> dict[str, Any]:
    """Return the device, its working dtypes, gloo, FSDP2, and warnings."""
    device, notes = find_device(), []  # type: ignore[var-annotated]
    is_mps = torch.backends.mps.is_available()
    dtypes = working_dtypes(device.type, notes=notes)
    if not is_mps:
        built = (
            "this torch was built without it"
            if not torch.backends.mps.is_built()
            else "needs macOS 13 on a Mac"
        )
        notes.append(f"MPS is not available ({built}); {device.type} is used")
    elif os.environ.get(FALLBACK) != "1":
        notes.append(f"operators without a Metal kernel fail: set {FALLBACK}=1 before starting Python")
    problem = _try_fsdp(device)
    if problem:
        notes.append(f"FSDP2 does not run on {device.type}: {problem}")
    return {
        "mps_available": is_mps,
        "mps_built": torch.backends.mps.is_built(),
        "device": device.type,
        "pytorch_version": torch.__version__,
        "macos_version": platform.mac_ver()[0] or None,
        "float16_supported": "fp16" in dtypes,
        "bfloat16_supported": "bf16" in dtypes,
        "distributed_available": dist.is_available(),
        "gloo_available": dist.is_available() and dist.is_gloo_available(),
        "backend": "gloo",
        "fsdp_supported": None if problem is None else not problem,
        "warnings": notes,
    }


def _try_fsdp(device: torch.device) -> str | None:
    """Return why FSDP2 fails, "" if it works; None within connected processes, where all would have to try it together."""
    if dist.is_initialized():
        return None
    connect_alone()
    try:
        return fsdp_problem(device)
    finally:
        disconnect()
