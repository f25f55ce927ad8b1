"""Create the adapter of a quantization that runs on a backend."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from crosstune.compat.backend_manager import Backend, BackendManager
from crosstune.compat.quantization_adapters import ADAPTERS, check_config, each_config, without_effect
from crosstune.compat.quantization_config import (
    DTYPES,
    QuantizationAdapter,
    QuantizationConfig,
    QuantizationMethod,
    dtype_name,
    method_for,
)
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.machine import BackendReport, Machine
from crosstune.torch_engine.probe import torch_dtype


def create_quantization_adapter(
    backend: str | Backend | None,
    config: QuantizationConfig | None = None,
    *,
    machine: Machine | None = None,
    strict: bool = False,
) -> QuantizationAdapter:
    """Return an adapter for the configuration, or for the nearest one that runs on the backend.

    Each change is a warning and is recorded in `adjustments`; with `strict` it is a ValueError.
    """
    report = _report(backend, machine)
    asked = QuantizationConfig() if config is None else config
    for each in each_config(asked):
        check_config(each)
    used, changes = _adjust(asked, report)
    if strict and changes:
        raise ValueError(" ".join(changes))
    # The adapter itself warns about options that have no effect with the method that is used.
    lost = [] if used.method is asked.method else without_effect(asked)
    for text in changes + lost:
        warnings.warn(text, UserWarning, stacklevel=2)
    adapter = ADAPTERS[used.method.library](used)
    adapter.adjustments = changes
    return adapter


def _report(backend: str | Backend | None, machine: Machine | None) -> BackendReport:
    return BackendManager(backend, verbose=False, machine=machine).report


def _runs(config: QuantizationConfig, report: BackendReport) -> bool:
    library = config.method.library
    return library == "none" or config.bits in report.quantizers.get(library, ())


def _computes(config: QuantizationConfig, report: BackendReport) -> bool:
    name = dtype_name(config.compute_dtype)
    return name is None or DTYPES[name] in report.dtypes


def _why_not_here(config: QuantizationConfig, report: BackendReport) -> str:
    runs = [f"{name} {'/'.join(map(str, sorted(bits)))}" for name, bits in report.quantizers.items()]
    return (
        f"{config.method.name} with {config.bits} bits does not run on {report.name} here; "
        f"these run: {'; '.join(runs) or 'none'} (and NONE, 16 bits)."
    )


def _no_such_type(config: QuantizationConfig, report: BackendReport) -> str:
    works = [name for name, short in DTYPES.items() if short in report.dtypes]
    return (
        f"compute_dtype {dtype_name(config.compute_dtype)} does not work on {report.name} here; "
        f"these do: {', '.join(works)}."
    )


def _adjust(config: QuantizationConfig, report: BackendReport) -> tuple[QuantizationConfig, list[str]]:
    """Return the configuration that will run, and a sentence for each change."""
    used, changes = config, []
    missing = [each for each in each_config(config) if not _runs(each, report)]
    if missing:
        used = next(iter(_others(config, report)), _sixteen_bits(config, report))
        layers = " and layer_configs is left out" if config.layer_configs and not used.layer_configs else ""
        changes.append(f"{_why_not_here(missing[0], report)} {used.method.name} is used instead{layers}.")
    if not _computes(used, report):
        better = "float16" if "fp16" in report.dtypes else "float32"
        changes.append(f"{_no_such_type(used, report)} {better} is used instead.")
        used = replace(used, compute_dtype=torch_dtype(DTYPES[better]))
    return used, changes


def _others(config: QuantizationConfig, report: BackendReport) -> list[QuantizationConfig]:
    """Return configurations with the same bits by other libraries, for those that run every layer on this backend."""
    widths = {each.bits for each in each_config(config)}
    able = [library for library in read_quantizers() if all(method_for(library, bits) for bits in widths)]
    moved = [config.moved_to(library) for library in able]
    return [
        other
        for other in moved
        if other is not None and all(_runs(each, report) for each in each_config(other))
    ]


def _sixteen_bits(config: QuantizationConfig, report: BackendReport) -> QuantizationConfig:
    storage: Any = None if "bf16" in report.dtypes else "float16"
    return replace(
        config,
        method=QuantizationMethod.NONE,
        bits=16,
        quant_type="nf4",
        storage_dtype=storage,
        layer_configs={},
    )
