"""Describe a machine: one report per backend, made by a probe or read from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from crosstune.core.errors import UserError, shown
from crosstune.files.json_fields import (
    FLAG,
    OBJECT,
    TEXT,
    Rule,
    check_fields,
    list_of,
    map_of,
    object_with,
    real,
    whole,
)
from crosstune.files.json_files import read_object

MACHINE_FORMAT = 1
_NAMES = list_of(TEXT)
_MACHINE_FIELDS = {
    "name": TEXT,
    "system": TEXT,
    "processor": TEXT,
    "num_cores": whole(1, 2**20),
    "memory_total_bytes": whole(0),
    "backends": map_of(OBJECT),
}
_DEVICE_FIELDS = {"name": TEXT, "memory_total_bytes": whole(0), "memory_free_bytes": whole(0)}
_BACKEND_FIELDS = {
    "name": TEXT,
    "engine": Rule("torch or mlx", lambda value: value in ("torch", "mlx")),
    "available": FLAG,
    "reason": TEXT,
    "device": TEXT,
    "devices": list_of(object_with(_DEVICE_FIELDS)),
    "unified_memory": FLAG,
    "dtypes": _NAMES,
    "bf16_speedup": real(0),
    "quantizers": map_of(list_of(whole(1, 64))),
    "collectives": _NAMES,
    "attention": _NAMES,
    "has_triton": FLAG,
    "notes": _NAMES,
}
_MAKE_ONE = "make one on that computer with: crosstune doctor --json > machine.json"
FLASH_PACKAGE = "flash_attn"
"""The package, and the name of its kernel in a BackendReport."""
_FUSED = frozenset({"efficient", "cudnn"})
"""Other torch kernels that store no scores."""

Attention = Literal["flash_attn", "sdpa", "eager", "mlx"]


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    memory_total_bytes: int
    memory_free_bytes: int


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """One backend on one machine: its availability, and the features that worked in the probe."""

    name: str
    engine: str
    available: bool
    reason: str = ""
    """Why it is not available, and how to make it so."""
    device: str = "cpu"
    """The engine's name for the device."""
    devices: tuple[Device, ...] = ()
    unified_memory: bool = False
    dtypes: tuple[str, ...] = ()
    """The dtypes in which a small matmul and its gradient were correct."""
    bf16_speedup: float = 1.0
    """The speed of a bf16 matmul relative to fp32."""
    quantizers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Quantizers that work on the machine -> their bit widths."""
    collectives: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    has_triton: bool = True
    """True if kernels written in Triton run, on a GPU; not tried on other devices."""
    notes: tuple[str, ...] = ()

    @property
    def is_torch_cpu(self) -> bool:
        """True if torch computes on the CPU, for any name of the backend."""
        return self.engine == "torch" and self.device == "cpu"

    @property
    def has_flash_attention(self) -> bool:
        """True if --use_flash_attention has a kernel: torch's, flash_attn's or MLX's fused attention."""
        fused = "sdpa" if self.engine == "mlx" else "flash"
        return any(fused in kernel for kernel in self.attention)

    @property
    def memory_total_bytes(self) -> int:
        return min((device.memory_total_bytes for device in self.devices), default=0)

    @property
    def memory_free_bytes(self) -> int:
        return min((device.memory_free_bytes for device in self.devices), default=0)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A computer: its backends by name."""

    name: str
    system: str
    processor: str
    num_cores: int
    memory_total_bytes: int
    backends: Mapping[str, BackendReport]
    versions: Mapping[str, str] = field(default_factory=dict)

    def available(self) -> list[str]:
        return [name for name, report in self.backends.items() if report.available]

    def to_json(self) -> dict[str, Any]:
        return {"format": MACHINE_FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str) -> Machine:
        """Read a machine report, ignoring unknown keys such as the checks and advice of `doctor`."""
        if data.get("format") != MACHINE_FORMAT:
            raise UserError(
                f"{source} is not a machine report this version can read.",
                why=f"its format is {shown(data.get('format'))}, not {MACHINE_FORMAT}.",
                do=_MAKE_ONE,
            )
        check_fields(data, _MACHINE_FIELDS, required=tuple(_MACHINE_FIELDS), source=source, do=_MAKE_ONE)
        backends = {
            name: _backend_from_json(report, place=f"backends.{name:.40}.", source=source)
            for name, report in data["backends"].items()
        }
        known = {item.name for item in fields(cls)} - {"backends"}
        return cls(backends=backends, **{key: value for key, value in data.items() if key in known})


def read_machine(path: Path) -> Machine:
    return Machine.from_json(read_object(path), source=str(path))


def choose_backend(machine: Machine, *, preference: Sequence[str]) -> str:
    """Return the backend of `auto`."""
    order = auto_order(machine, preference=preference)
    if not order:
        raise UserError(
            f"No backend can be used on {machine.name}.",
            why="; ".join(f"{report.name}: {report.reason}" for report in machine.backends.values()),
            do="pip install 'crosstune[torch]', which runs on any CPU",
        )
    return order[0]


def auto_order(machine: Machine, *, preference: Sequence[str]) -> list[str]:
    """Return the available backends in the order of `auto`: as in `preference`, but an accelerator backend that computes on
    the CPU (MLX on Linux) comes last, since the cpu backend is faster."""
    available = [name for name in preference if name in machine.available()]
    return sorted(available, key=lambda name: name != "cpu" and machine.backends[name].device == "cpu")


def auto_reason(machine: Machine, *, preference: Sequence[str]) -> str:
    """Return why `auto` chooses its backend."""
    chosen = choose_backend(machine, preference=preference)
    available = [name for name in preference if name in machine.available()]
    passed = available[: available.index(chosen)]
    if passed:
        return f"{' and '.join(passed)} would compute on the CPU of this machine, where {chosen} is faster"
    if len(available) == 1:
        return "the only available backend"
    return f"the first available backend, before {', '.join(available[1:])}"


def _backend_from_json(data: Mapping[str, Any], *, place: str, source: str) -> BackendReport:
    required = ("name", "engine", "available")
    check_fields(data, _BACKEND_FIELDS, required=required, place=place, source=source, do=_MAKE_ONE)
    known = {item.name for item in fields(BackendReport)}
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in data.items() if key in known
    }
    devices = values.get("devices", ())
    values["devices"] = tuple(Device(**{key: device[key] for key in _DEVICE_FIELDS}) for device in devices)
    values["quantizers"] = {name: tuple(bits) for name, bits in values.get("quantizers", {}).items()}
    return BackendReport(**values)


def choose_attention(
    report: BackendReport, *, flash: bool | None, precision: str, packing: bool
) -> tuple[Attention, str]:
    """Return the implementation of attention, and why; `flash` is --use_flash_attention.

    torch's own attention picks the best of its kernels, including flash, at each call.
    """
    if report.engine == "mlx":
        return "mlx", "MLX's own fused attention"
    if flash is False:
        return "eager", "flash attention is turned off"
    kernels = ", ".join(kernel for kernel in report.attention if kernel != FLASH_PACKAGE)
    own = f"torch's own; its kernels on {report.name}: {kernels or 'none'}"
    if FLASH_PACKAGE not in report.attention:
        return "sdpa", own
    if precision == "fp32":
        return "sdpa", f"{own}; {FLASH_PACKAGE} does not support fp32"
    if packing:
        return "sdpa", f"{own}; {FLASH_PACKAGE} does not separate the documents of packed rows"
    return "flash_attn", f"the package {FLASH_PACKAGE}, where the model supports it"


def held_score_bits(
    report: BackendReport,
    *,
    flash: bool | None,
    compute_bits: int,
    shares_keys: bool = False,
    has_sinks: bool = False,
) -> int:
    """Return the bits of each attention score kept in memory during training; 0 for a kernel that never stores them.

    `shares_keys`: heads share keys, in rows without a mask. Without a fused kernel, torch computes scores in fp32. On CUDA,
    kernels with shared keys are 16-bit only. MLX stores scores in the model's precision, and so does transformers if attention
    has sinks.
    """
    if report.engine == "mlx" or has_sinks:
        return compute_bits
    is_fused = report.has_flash_attention or not _FUSED.isdisjoint(report.attention)
    if report.device == "cuda" and shares_keys and compute_bits == 32:
        is_fused = False
    return 0 if is_fused and flash is not False else 32
