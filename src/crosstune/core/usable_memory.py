"""Compute how much of a device's memory a training step may use."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.core.backend import BackendSpec
from crosstune.core.machine import BackendReport, Machine

UNIFIED_SHARE = 0.9
"""The largest share of unified memory that a GPU may use."""


def usable_bytes(
    machine: Machine, report: BackendReport, spec: BackendSpec, *, environment: Mapping[str, str]
) -> int:
    """Return the bytes that a training step may use on a device of this backend with these variables set."""
    share = spec.usable_share(environment)
    device = report.memory_total_bytes
    if not report.unified_memory or not device:
        return int(device * (spec.memory_share if share is None else share))
    most = int(max(device, machine.memory_total_bytes) * UNIFIED_SHARE)
    return most if share is None else min(int(device * share), most)
