"""Derive profiles of common machines from the bundled profiles: other devices, other memory, several devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from crosstune.estimate.machine import BackendReport, Device, Machine
from crosstune.estimate.memory import GIB
from crosstune.files.yaml_files import read_yaml

_OLD = {"dtypes": ("fp32", "fp16"), "bf16_speedup": 0.3, "attention": ("efficient", "math")}
"""Before Ampere: neither bf16 nor torch's flash attention."""
_FOUR_BITS = {"bnb": (4,), "hqq": (1, 2, 3, 4, 8), "quanto": (2, 4, 8)}
"""Before Turing: the 8-bit matmuls of bitsandbytes are missing."""
_GENERATIONS: Mapping[str, Mapping[str, Any]] = {
    "pascal": {**_OLD, "quantizers": _FOUR_BITS, "has_triton": False},
    "volta": {**_OLD, "quantizers": _FOUR_BITS},
    "turing": _OLD,
    "amd": {"name": "rocm", "attention": ("flash", "efficient", "math")},
    "arc": {"name": "xpu", "device": "xpu", "collectives": ("xccl", "gloo"), "attention": ("math",)},
}
"""Generation -> differences from an RTX 4090."""
_NOTES = {
    "gtx-1080-ti": "the newest torch builds for this GPU are those for CUDA 12.6",
    "v100-16gb": "the newest torch builds for this GPU are those for CUDA 12.6",
    "v100-32gb": "the newest torch builds for this GPU are those for CUDA 12.6",
    "mi250": "a card has two devices of 64 GiB: mi250-x2",
}
_SEVERAL = re.compile(r"(?P<name>.+)-x(?P<count>[1-9][0-9]{0,3})")
_SIZED = re.compile(r"(?P<name>.+):(?P<size>[1-9][0-9]{0,3})gb")


@cache
def _catalog() -> dict[str, dict[str, list[Any]]]:
    """Return the tables of catalog.yaml."""
    tables: dict[str, dict[str, list[Any]]] = read_yaml(Path(__file__).with_suffix(".yaml"))
    return tables


def catalog_names() -> list[str]:
    """Return the names of the machines with one GPU or an Apple chip."""
    apple = [f"apple-{chip}-{size}gb" for chip, sizes in _catalog()["apple"].items() for size in sizes]
    return [*_catalog()["gpus"], *apple]


def split_count(name: str) -> tuple[str, int]:
    """Return the name of a machine and its number of devices: `h200-x8` is eight times `h200`."""
    found = _SEVERAL.fullmatch(name)
    return (found["name"], int(found["count"])) if found else (name, 1)


def with_devices(machine: Machine, count: int) -> Machine:
    """Return the machine with `count` GPUs, and its host memory once per GPU."""
    backends = {
        name: replace(report, devices=report.devices * count)
        if report.devices and report.device != "cpu" and not report.unified_memory
        else report
        for name, report in machine.backends.items()
    }
    return replace(
        machine,
        name=f"{machine.name}-x{count}",
        memory_total_bytes=machine.memory_total_bytes * count,
        backends=backends,
    )


def split_size(name: str) -> tuple[str, int | None]:
    """Return the name of a machine and the memory of its device in GB: `rtx-4090:48gb` is an `rtx-4090` with 48 GB."""
    found = _SIZED.fullmatch(name)
    return (found["name"], int(found["size"])) if found else (name, None)


def with_memory(machine: Machine, size_gb: int) -> Machine:
    """Return the machine with devices of `size_gb`; an Apple machine or a CPU with that much memory in all."""
    name = f"{machine.name}:{size_gb}gb"
    if machine.name.startswith("apple-"):
        return replace(_apple_memory(machine, size_gb * GIB), name=name)
    own = [key for key, report in machine.backends.items() if report.devices and key != "cpu"] or ["cpu"]
    backends = {
        key: replace(report, devices=tuple(_sized(device, size_gb * GIB) for device in report.devices))
        if key in own
        else report
        for key, report in machine.backends.items()
    }
    total = size_gb * GIB if own == ["cpu"] else machine.memory_total_bytes
    return replace(machine, name=name, memory_total_bytes=total, backends=backends)


def _sized(device: Device, num_bytes: int, *, name: str | None = None, free_share: float = 0.96) -> Device:
    free = int(num_bytes * free_share)
    return Device(name=name or device.name, memory_total_bytes=num_bytes, memory_free_bytes=free)


def make_gpu(name: str, like: Machine) -> Machine:
    """Return `like`, a machine with an NVIDIA GPU, with the table's GPU and host memory."""
    title, device_gib, host_gib, generation = _catalog()["gpus"][name]
    report = replace(like.backends["cuda"], **_GENERATIONS.get(generation, {}))
    notes = (*report.notes, _NOTES[name]) if name in _NOTES else report.notes
    device = _sized(report.devices[0], int(device_gib * GIB), name=title, free_share=0.97)
    report = replace(report, devices=(device,), notes=notes)
    cpu = like.backends["cpu"]
    host = _sized(cpu.devices[0], host_gib * GIB, free_share=0.9)
    backends = {**like.backends, report.name: report, "cpu": replace(cpu, devices=(host,))}
    if report.name != "cuda":
        build = {"rocm": "ROCm", "xpu": "Intel XPU"}[report.name]
        for other, wanted in (("cuda", "CUDA"), ("rocm", "ROCm"), ("xpu", "Intel XPU")):
            if other != report.name:
                reason = f"this torch was built for {build}, not {wanted}"
                missing = BackendReport(name=other, engine="torch", available=False, reason=reason)
                backends[other] = replace(missing, device="xpu" if other == "xpu" else "cuda")
    return replace(like, name=name, memory_total_bytes=host_gib * GIB, backends=backends)


def make_apple(name: str, like: Machine) -> Machine:
    """Return an Apple machine of the table."""
    chip, _, size = name.removeprefix("apple-").rpartition("-")
    title = f"Apple {chip.replace('-', ' ').title()}"
    machine = _apple_memory(like, int(size.removesuffix("gb")) * GIB, title=title)
    return replace(machine, name=name, processor=title)


def _apple_memory(machine: Machine, total: int, *, title: str | None = None) -> Machine:
    """Return the machine with `total` bytes. Metal recommends two thirds of them up to 36 GB, three quarters above."""
    shared = int(total * (2 / 3 if total <= 36 * GIB else 3 / 4))
    backends = {
        backend: replace(
            report,
            devices=tuple(
                _sized(device, shared if report.unified_memory else total, name=title)
                for device in report.devices
            ),
        )
        for backend, report in machine.backends.items()
    }
    return replace(machine, memory_total_bytes=total, backends=backends)
