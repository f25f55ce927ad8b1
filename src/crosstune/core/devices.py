"""Peak speeds of common devices, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpeed:
    tflops: float
    """Dense products of 16-bit numbers, in 10^12 operations per second."""
    memory_gb_s: float
    link_gb_s: float
    """To another device of the same machine, in one direction: NVLink or PCIe."""
    network_gb_s: float
    """To another machine, for each device, in one direction, over the usual network card."""
    fp8: bool = False
    """Whether fp8 products were measured to be faster on this chip."""


# Part of a device's name -> TFLOP/s, GB/s of memory, of the link, and of the network. The first match counts.
_DEVICES = {
    "B200": (2250, 8000, 900, 50),
    "H200": (989, 4800, 450, 50),
    "H100": (989, 3350, 450, 50),
    "A100": (312, 2039, 300, 25),
    "L40S": (362, 864, 32, 12.5),
    "L4": (121, 300, 32, 12.5),
    "A10": (125, 600, 32, 12.5),
    "T4": (65, 320, 16, 12.5),
    "RTX 4090": (165, 1008, 32, 1.25),
    "RTX 4080": (97.5, 717, 32, 1.25),
    "RTX 3090": (71, 936, 32, 1.25),
    "M1": (2.6, 68, 0, 0.125),
    "M2 Max": (13.6, 400, 0, 1.25),
    "M3 Ultra": (28.4, 819, 0, 1.25),
    "M3 Max": (14.2, 400, 0, 0.125),
    "M3 Pro": (6.4, 150, 0, 0.125),
    "M3": (3.5, 100, 0, 0.125),
    "M4 Max": (17.0, 546, 0, 0.125),
    "M4 Pro": (8.5, 273, 0, 0.125),
    "M4": (4.3, 120, 0, 0.125),
}

_FAST_IN_FP8 = ("H200", "H100")


def find_speed(name: str) -> DeviceSpeed | None:
    """Return the speeds of a device by its name, such as "NVIDIA H200"; None for an unknown device."""
    words = f" {name} "
    for part, numbers in _DEVICES.items():
        if f" {part} " in words or f" {part}-" in words:
            return DeviceSpeed(*numbers, fp8=part in _FAST_IN_FP8)
    return None
