"""BackendManager of the original interface, built on the probe of this machine."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.util import find_spec
from typing import Any

from crosstune.backends._host import memory_bytes
from crosstune.config.load import backend_variables
from crosstune.config.resolve.fit_compute import best_precision, prefers_fast
from crosstune.core.backend import backend_specs
from crosstune.core.quantization import quantizer_names
from crosstune.estimate.machine import BackendReport, Machine, held_score_bits
from crosstune.estimate.memory import GIB, largest_batch, usable_bytes
from crosstune.estimate.model_shape import Step, shape_for_size
from crosstune.machines.probe import fastest_backend, probe_backend, probe_machine
from crosstune.torch_engine.probe import allocated_bytes, torch_device, torch_dtype

LARGEST_SIZE_B = 4096


class Backend(Enum):
    """A backend by name; `str()` gives its value for --backend."""

    CUDA = "cuda"
    ROCM = "rocm"
    XPU = "xpu"
    MLX = "mlx"
    MPS = "mps"
    CPU = "cpu"

    def __str__(self) -> str:
        return self.value


@dataclass
class BackendCapabilities:
    """The capabilities of a backend on this machine, under their original names."""

    quantization_bits: list[int] = field(default_factory=list)
    supports_distributed: bool = False
    supports_fsdp: bool = False
    supports_bfloat16: bool = False
    supports_flash_attention: bool = False
    max_model_size: float | None = None
    """Billions of parameters for which LoRA training is estimated to fit; None if the memory is unknown."""
    distributed_backend: str | None = None
    notes: list[str] = field(default_factory=list)


class ProbedCapabilities(Mapping[Backend, BackendCapabilities]):
    """The capabilities of every backend on this machine; each is probed when it is read."""

    def __getitem__(self, backend: Backend) -> BackendCapabilities:
        report = probe_machine(backends=[backend.value], quantizers=quantizer_names())
        return find_capabilities(report, backend)

    def __iter__(self) -> Iterator[Backend]:
        return iter(Backend)

    def __len__(self) -> int:
        return len(Backend)


CAPABILITIES = ProbedCapabilities()


class BackendManager:
    """Device, capabilities and memory of one backend on this machine or on the given `machine`."""

    CAPABILITIES = CAPABILITIES

    def __init__(
        self,
        backend: str | Backend | None = None,
        verbose: bool = True,
        *,
        machine: Machine | None = None,
    ) -> None:
        wanted = _find(backend)
        self.verbose = verbose
        self._is_here = machine is None
        self.machine = probe_machine() if machine is None else machine
        self._available_backends, specs = self._detect_available_backends(), backend_specs()
        self.backend = Backend(fastest_backend(self.machine)) if wanted is None else wanted
        if self.backend not in self._available_backends:
            report = self.machine.backends.get(self.backend.value)
            reason = report.reason if report is not None else f"{self.machine.name} has no report on it"
            raise ValueError(
                f"Backend '{self.backend}' is not available: {reason}. {specs[self.backend.value].install}. "
                f"Use --backend auto, or specify an available backend. Available backends: {', '.join(map(str, self._available_backends)) or 'none'}."
            )
        if machine is None:
            # Probing quantizers takes seconds, so it is done for the chosen backend only.
            probed = probe_backend(specs[self.backend.value], quantizers=quantizer_names())
            backends = {**self.machine.backends, self.backend.value: probed}
            self.machine = replace(self.machine, backends=backends)
        self.report = self.machine.backends[self.backend.value]
        self.device = _device(self.report)
        self.capabilities = find_capabilities(self.machine, self.backend)
        if verbose:
            print("\n".join(self._summary()))

    @classmethod
    def from_env(
        cls, verbose: bool = True, *, environment: Mapping[str, str] | None = None
    ) -> BackendManager:
        """Return the manager of $FSDP_BACKEND; if it is unset or `auto`, of the fastest backend."""
        variables = os.environ if environment is None else environment
        return cls(backend=variables.get("FSDP_BACKEND") or None, verbose=verbose)

    @property
    def backend_type(self) -> str:
        """The backend's name, such as "mlx"."""
        return self.backend.value

    def _detect_available_backends(self) -> list[Backend]:
        """Return the available backends, in the order of preference of `auto`."""
        found = [backend for backend in Backend if backend.value in self.machine.available()]
        return sorted(found, key=lambda backend: backend_specs()[backend.value].preference)

    def supports_quantization(self, bits: int) -> bool:
        return bits in self.capabilities.quantization_bits

    def get_dtype(self, prefer_bfloat16: bool = True) -> Any:
        """Return the first supported dtype: bfloat16 if preferred, then float16, then float32.

        On a CPU, as for `train`, it is bfloat16 only if that is clearly faster, otherwise float32.
        """
        return torch_dtype(preferred_dtype(self.report, prefer_bfloat16=prefer_bfloat16))

    def get_distributed_backend(self) -> str | None:
        return self.capabilities.distributed_backend

    def validate_model_size(self, model_size_b: float) -> None:
        """Raise a ValueError if the model is too large to train on this backend."""
        limit = self.capabilities.max_model_size
        if limit is not None and model_size_b > limit:
            raise ValueError(
                f"A model of {model_size_b:g}B parameters exceeds the limit of backend '{self.backend}': "
                f"about {limit:g}B parameters fit into {self.report.memory_total_bytes / GIB:.1f} GiB."
            )

    def get_memory_info(self) -> dict[str, int | float]:
        """Return the current memory of the first device in bytes; for a given `machine`, its recorded memory."""
        total, free = self.report.memory_total_bytes, self.report.memory_free_bytes
        allocated = reserved = 0
        if self._is_here:
            if self.report.engine == "torch":
                allocated, reserved = allocated_bytes(self.report.device)
            if self.report.device == "cpu" or self.report.unified_memory:
                free = min(total, memory_bytes()[1])
        used = max(0, total - free)
        return {
            "total_memory": total,
            "free_memory": free,
            "available_memory": free,
            "used_memory": used,
            "allocated_memory": allocated,
            "reserved_memory": reserved,
            "percent_used": round(100 * used / total, 1) if total else 0.0,
        }

    def get_optimal_batch_size(self, model_size_b: float, sequence_length: int = 2048) -> int:
        """Estimate the largest batch for LoRA in free memory, with the narrowest base that runs: 4, 8 or 16 bits.

        Return 0 if not even one row fits.
        """
        limit = min(_usable_bytes(self.machine, self.report), self.report.memory_free_bytes)
        return estimate_batch(self.report, model_size_b, limit=limit, context=sequence_length)

    def _summary(self) -> list[str]:
        from crosstune.cli.commands.doctor import report_lines

        machine, size_b = self.machine, self.capabilities.max_model_size
        collective = self.capabilities.distributed_backend or "no"
        return [
            f"{machine.name}: {machine.system}, {machine.processor}, {machine.num_cores} cores",
            f"available backends: {', '.join(map(str, self._available_backends))}",
            f"backend: {self.backend} (device {self.device})",
            *report_lines(self.report),
            f"      distributed  {collective}{', FSDP' * self.capabilities.supports_fsdp}",
            *([f"      model        about {size_b:g}B parameters at most"] if size_b else []),
        ]


def get_backend_manager(backend: str | Backend | None = None, verbose: bool = True) -> BackendManager:
    return BackendManager(backend=backend, verbose=verbose)


def detect_backend() -> Backend:
    """Return the backend that `auto` selects on this machine."""
    return Backend(fastest_backend(probe_machine()))


def get_device(backend: str | Backend | None = None) -> Any:
    """Return the torch.device of a backend, by default the fastest."""
    return BackendManager(backend, verbose=False, machine=probe_machine()).device


def _find(backend: str | Backend | None) -> Backend | None:
    if backend is None or isinstance(backend, Backend):
        return backend
    name = backend.strip().lower()
    if name == "auto":
        return None
    if name not in {member.value for member in Backend}:
        raise ValueError(
            f"Unknown backend '{backend}'. Known backends: auto, {', '.join(map(str, Backend))}."
        )
    return Backend(name)


def _device(report: BackendReport) -> Any:
    """Return the torch.device, `cpu` for MLX; only its name without torch."""
    name = report.device if report.engine == "torch" else "cpu"
    return torch_device(name) if find_spec("torch") is not None else name


def find_capabilities(machine: Machine, backend: Backend) -> BackendCapabilities:
    """Return the capabilities of a backend on a machine; for an unavailable backend, only the reason in `notes`."""
    report = machine.backends[backend.value]
    if not report.available:
        return BackendCapabilities(notes=[report.reason])
    bits = {width for widths in report.quantizers.values() for width in widths}
    if {"bf16", "fp16"} & set(report.dtypes):
        bits.add(16)
    # gloo on MPS: it reduces copies of the tensors in host memory.
    collective = next(iter(report.collectives), backend_specs()[report.name].collective)
    is_distributed = collective is not None
    return BackendCapabilities(
        quantization_bits=sorted(bits),
        supports_distributed=is_distributed,
        supports_fsdp=is_distributed and report.engine == "torch",
        supports_bfloat16="bf16" in report.dtypes,
        supports_flash_attention=report.has_flash_attention,
        max_model_size=_largest_model_b(machine, report),
        distributed_backend=collective,
        notes=list(report.notes),
    )


def preferred_dtype(report: BackendReport, *, prefer_bfloat16: bool = True) -> str:
    """Return the dtype to compute in, as the first word of --precision; on a CPU, the choice of `train`."""
    if report.device == "cpu":
        best = best_precision(report)[0].partition("_")[0]
        return best if prefer_bfloat16 else "fp32"
    order = ("bf16", "fp16", "fp32") if prefer_bfloat16 else ("fp16", "fp32")
    return next(name for name in order if name in report.dtypes)


def _usable_bytes(machine: Machine, report: BackendReport) -> int:
    return usable_bytes(machine, report, backend_specs()[report.name], environment=backend_variables())


def estimate_batch(
    report: BackendReport,
    size_b: float,
    *,
    limit: int,
    context: int,
    bits: int | None = None,
    at_most: int = 1024,
) -> int:
    """Estimate the largest batch of a LoRA training, in the dtype of `get_dtype`, with gradient checkpointing.

    `bits` is the width of the base; default: 4 or 8 if a quantizer runs, otherwise the width of the dtype.
    """
    compute_bits = 32 if preferred_dtype(report) == "fp32" else 16
    widths = {width: name for name, found in report.quantizers.items() for width in found}
    bits = bits or next((width for width in (4, 8) if width in widths), compute_bits)
    quantizer = widths.get(bits, "bnb") if bits < 16 else "none"
    shape = shape_for_size(size_b)
    step = Step(
        quantizer=quantizer,
        n_bits=bits,
        context=context,
        checkpointing=True,
        compute_bits=compute_bits,
        weight_bits=compute_bits,
        score_bits=held_score_bits(report, flash=None, compute_bits=compute_bits),
        on_gpu=not report.is_torch_cpu,
        fast=prefers_fast(report, best_precision(report)[0], quantizer=quantizer, hidden=shape.hidden),
        overhead_bytes=backend_specs()[report.name].overhead_bytes,
    )
    return largest_batch(shape, step, limit_bytes=limit, at_most=at_most)


def _largest_model_b(machine: Machine, report: BackendReport) -> float | None:
    """Return the billions of parameters that are estimated to fit with one row of 512 tokens; whole from 10B on."""
    if not report.devices:
        return None
    limit = _usable_bytes(machine, report)

    def is_too_large(tenths: int) -> bool:
        return estimate_batch(report, tenths / 10, limit=limit, context=512, at_most=1) == 0

    size_b = bisect_left(range(1, LARGEST_SIZE_B * 10), True, key=is_too_large) / 10
    return size_b if size_b < 10 else float(int(size_b))
