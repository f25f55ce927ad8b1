"""Derive profiles of common machines from the bundled ones: other devices, other memory, several devices."""

from __future__ import annotations

import re
from dataclasses import replace

from crosstune.estimate.machine import Machine
from crosstune.estimate.memory import GIB

# Name -> the device's name, its memory in GiB, and the memory of the machine in GiB.
_GPUS = {
    "t4": ("Tesla T4", 14.6, 32),
    "l4": ("NVIDIA L4", 22.0, 64),
    "a10": ("NVIDIA A10", 22.1, 64),
    "rtx-3090": ("NVIDIA GeForce RTX 3090", 23.7, 64),
    "rtx-4080": ("NVIDIA GeForce RTX 4080", 15.7, 64),
    "l40s": ("NVIDIA L40S", 44.4, 128),
    "h100": ("NVIDIA H100 80GB HBM3", 79.1, 256),
    "b200": ("NVIDIA B200", 178.4, 512),
}
# Chip -> the memory sizes it is sold with, in GB.
_APPLE = {
    "m3": (8, 16, 24),
    "m3-pro": (18, 36),
    "m3-max": (36, 48, 64, 96, 128),
    "m3-ultra": (96, 256, 512),
    "m4": (16, 24, 32),
    "m4-pro": (24, 48, 64),
    "m4-max": (36, 48, 64, 128),
}
NUM_DEVICES = (2, 8)
_SEVERAL = re.compile(r"(?P<name>.+)-x(?P<count>[0-9]{1,4})")
_TURING_ATTENTION = ("efficient", "math")


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


def make_gpu(name: str, like: Machine) -> Machine:
    """Return `like` with the table's GPU and host memory."""
    title, device_gib, host_gib = _GPUS[name]
    report = like.backends["cuda"]
    device = replace(
        report.devices[0],
        name=title,
        memory_total_bytes=int(device_gib * GIB),
        memory_free_bytes=int(device_gib * GIB * 0.97),
    )
    cuda = replace(report, devices=(device,))
    if name == "t4":  # it has neither bf16 nor torch's flash attention
        cuda = replace(cuda, dtypes=("fp32", "fp16"), bf16_speedup=0.3, attention=_TURING_ATTENTION)
    cpu = like.backends["cpu"]
    host = replace(
        cpu.devices[0], memory_total_bytes=host_gib * GIB, memory_free_bytes=int(host_gib * GIB * 0.9)
    )
    backends = {**like.backends, "cuda": cuda, "cpu": replace(cpu, devices=(host,))}
    return replace(like, name=name, memory_total_bytes=host_gib * GIB, backends=backends)


def make_apple(name: str, like: Machine) -> Machine:
    """Return an Apple machine. Metal recommends two thirds of its memory up to 36 GB, three quarters above."""
    chip, _, size = name.removeprefix("apple-").rpartition("-")
    title = f"Apple {chip.replace('-', ' ').title()}"
    total = int(size.removesuffix("gb")) * GIB
    shared = int(total * (2 / 3 if total <= 36 * GIB else 3 / 4))
    backends = {}
    for backend, report in like.backends.items():
        usable = shared if report.unified_memory else total
        devices = tuple(
            replace(device, name=title, memory_total_bytes=usable, memory_free_bytes=int(usable * 0.96))
            for device in report.devices
        )
        backends[backend] = replace(report, devices=devices)
    return replace(like, name=name, processor=title, memory_total_bytes=total, backends=backends)
