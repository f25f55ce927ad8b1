"""Read the CPU name and the memory of this machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import psutil

from crosstune.estimate.machine import Device

_CGROUP = Path("/sys/fs/cgroup")


def processor_name() -> str:
    system = platform.system()
    if system == "Linux":
        name = _from_cpuinfo(Path("/proc/cpuinfo"))
    elif system == "Darwin":
        name = _from_sysctl()
    else:
        name = platform.processor()
    return name or platform.machine() or "unknown processor"


def memory_bytes(*, cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Return total and free memory, within the limit of a container."""
    memory = psutil.virtual_memory()
    limit, used = _read_bytes(cgroup / "memory.max"), _read_bytes(cgroup / "memory.current")
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, min(memory.available, max(0, limit - (used or 0)))


def processor_device() -> Device:
    total, free = memory_bytes()
    return Device(name=processor_name(), memory_total_bytes=total, memory_free_bytes=free)


def _from_cpuinfo(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _from_sysctl() -> str:
    command = ["sysctl", "-n", "machdep.cpu.brand_string"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _read_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no cgroup, or no limit ("max")
        return None
