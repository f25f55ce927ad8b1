"""Derive profiles of common machines from the bundled profiles: other devices, other memory, several devices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from crosstune.estimate.machine import BackendReport, Device, Machine
from crosstune.estimate.memory import GIB

# Name -> the device's name, its memory in GiB, the memory of the machine in GiB, and the generation.
_GPUS = {
    "gtx-1080-ti": ("NVIDIA GeForce GTX 1080 Ti", 10.9, 32, "pascal"),
    "v100-16gb": ("Tesla V100-SXM2-16GB", 15.8, 128, "volta"),
    "v100-32gb": ("Tesla V100-SXM2-32GB", 31.7, 256, "volta"),
    "t4": ("Tesla T4", 14.6, 32, "turing"),
    "rtx-2060": ("NVIDIA GeForce RTX 2060", 5.8, 32, "turing"),
    "rtx-2070": ("NVIDIA GeForce RTX 2070", 7.8, 32, "turing"),
    "rtx-2080": ("NVIDIA GeForce RTX 2080", 7.8, 32, "turing"),
    "rtx-2080-ti": ("NVIDIA GeForce RTX 2080 Ti", 10.8, 32, "turing"),
    "rtx-3060": ("NVIDIA GeForce RTX 3060", 11.8, 32, "ampere"),
    "rtx-3060-ti": ("NVIDIA GeForce RTX 3060 Ti", 7.8, 32, "ampere"),
    "rtx-3070": ("NVIDIA GeForce RTX 3070", 7.8, 32, "ampere"),
    "rtx-3080": ("NVIDIA GeForce RTX 3080", 9.8, 32, "ampere"),
    "rtx-3080-ti": ("NVIDIA GeForce RTX 3080 Ti", 11.8, 32, "ampere"),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", 23.7, 64, "ampere"),
    "rtx-3090-ti": ("NVIDIA GeForce RTX 3090 Ti", 23.7, 64, "ampere"),
    "a10": ("NVIDIA A10", 22.1, 64, "ampere"),
    "rtx-a6000": ("NVIDIA RTX A6000", 47.5, 128, "ampere"),
    "a100-40gb": ("NVIDIA A100-SXM4-40GB", 39.5, 128, "ampere"),
    "rtx-4060": ("NVIDIA GeForce RTX 4060", 7.8, 32, "ada"),
    "rtx-4060-ti": ("NVIDIA GeForce RTX 4060 Ti", 15.6, 32, "ada"),
    "rtx-4070": ("NVIDIA GeForce RTX 4070", 11.7, 32, "ada"),
    "rtx-4070-ti": ("NVIDIA GeForce RTX 4070 Ti", 11.7, 32, "ada"),
    "rtx-4080": ("NVIDIA GeForce RTX 4080", 15.7, 64, "ada"),
    "rtx-6000-ada": ("NVIDIA RTX 6000 Ada Generation", 47.5, 128, "ada"),
    "l4": ("NVIDIA L4", 22.0, 64, "ada"),
    "l40s": ("NVIDIA L40S", 44.4, 128, "ada"),
    "h100": ("NVIDIA H100 80GB HBM3", 79.1, 256, "hopper"),
    "gh200": ("NVIDIA GH200 480GB", 94.5, 480, "hopper"),
    "rtx-5060": ("NVIDIA GeForce RTX 5060", 7.8, 32, "blackwell"),
    "rtx-5060-ti": ("NVIDIA GeForce RTX 5060 Ti", 15.5, 32, "blackwell"),
    "rtx-5070": ("NVIDIA GeForce RTX 5070", 11.5, 32, "blackwell"),
    "rtx-5070-ti": ("NVIDIA GeForce RTX 5070 Ti", 15.5, 64, "blackwell"),
    "rtx-5080": ("NVIDIA GeForce RTX 5080", 15.5, 64, "blackwell"),
    "rtx-5090": ("NVIDIA GeForce RTX 5090", 31.4, 64, "blackwell"),
    "b200": ("NVIDIA B200", 178.4, 512, "blackwell"),
    "mi210": ("AMD Instinct MI210", 64.0, 256, "amd"),
    "mi250": ("AMD Instinct MI250", 64.0, 256, "amd"),
    "mi300x": ("AMD Instinct MI300X", 191.5, 512, "amd"),
    "rx-7900-xtx": ("AMD Radeon RX 7900 XTX", 24.0, 64, "amd"),
    "arc-a770": ("Intel(R) Arc(TM) A770 Graphics", 15.1, 32, "arc"),
    "arc-b580": ("Intel(R) Arc(TM) B580 Graphics", 11.3, 32, "arc"),
}
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
# Chip -> the memory sizes it is sold with, in GB.
_APPLE = {
    "m1": (8, 16),
    "m1-pro": (16, 32),
    "m1-max": (32, 64),
    "m1-ultra": (64, 128),
    "m2": (8, 16, 24),
    "m2-pro": (16, 32),
    "m2-max": (32, 64, 96),
    "m2-ultra": (64, 128, 192),
    "m3": (8, 16, 24),
    "m3-pro": (18, 36),
    "m3-max": (36, 48, 64, 96, 128),
    "m3-ultra": (96, 256, 512),
    "m4": (16, 24, 32),
    "m4-pro": (24, 48, 64),
    "m4-max": (36, 48, 64, 128),
    "m5": (16, 24, 32),
    "m5-pro": (24, 48, 64),
    "m5-max": (36, 48, 64, 128),
}
_SEVERAL = re.compile(r"(?P<name>.+)-x(?P<count>[1-9][0-9]{0,3})")
_SIZED = re.compile(r"(?P<name>.+):(?P<size>[1-9][0-9]{0,3})gb")


def catalog_names() -> list[str]:
    """Return the names of the machines with one GPU or an Apple chip."""
    apple = [f"apple-{chip}-{size}gb" for chip, sizes in _APPLE.items() for size in sizes]
    return [*_GPUS, *apple]


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
    title, device_gib, host_gib, generation = _GPUS[name]
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
