"""Choose a quantization that runs on a backend: create an adapter, validate a configuration, recommend one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from importlib.util import find_spec

from crosstune.compat.backend_manager import Backend, BackendManager, estimate_batch, preferred_dtype
from crosstune.compat.quantization_adapters import (
    ADAPTERS,
    QuantizationAdapter,
    check_config,
    each_config,
    without_effect,
)
from crosstune.compat.quantization_config import (
    DTYPES,
    QuantizationConfig,
    QuantizationMethod,
    dtype_name,
    method_for,
)
from crosstune.config.load import backend_variables
from crosstune.core.backend import backend_specs
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.machine import BackendReport, Machine
from crosstune.estimate.memory import GIB
from crosstune.torch_engine.probe import torch_dtype

_RECOMMENDED_BITS = (16, 8, 4, 3, 2)
_RECOMMENDED_CONTEXT = 2048


def create_quantization_adapter(
    backend: str | Backend | None,
    config: QuantizationConfig | None = None,
    *,
    machine: Machine | None = None,
    strict: bool = False,
) -> QuantizationAdapter:
    """Return an adapter for the configuration, changed if needed to run on the backend.

    Each change raises a warning and is recorded in `adjustments`; with `strict` it raises a ValueError.
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


def validate_quantization_config(
    config: QuantizationConfig, backend: str | Backend | None, *, machine: Machine | None = None
) -> list[str]:
    """Return the problems of the configuration on the backend; an empty list if it runs unchanged."""
    try:
        report = _report(backend, machine)
    except ValueError as error:
        return [str(error)]
    problems = [problem for each in each_config(config) for problem in _problems(each, report)]
    return [*dict.fromkeys(problems), *without_effect(config)]


def get_recommended_config(
    backend: str | Backend | None,
    model_size_b: float = 7,
    available_memory_gb: float = 16,
    *,
    machine: Machine | None = None,
) -> QuantizationConfig:
    """Return the configuration with the most bits for which LoRA at batch size 1 is estimated to fit.

    If none fits, warn and return the one with the fewest bits.
    """
    if model_size_b <= 0 or available_memory_gb <= 0:
        raise ValueError("model_size_b and available_memory_gb must be greater than 0.")
    report = _report(backend, machine)
    spec = backend_specs()[report.name]
    share = spec.usable_share(backend_variables())
    limit = int(available_memory_gb * GIB * (spec.memory_share if share is None else share))
    computes = find_spec("torch") is not None and report.dtypes
    dtype = torch_dtype(preferred_dtype(report)) if computes else None
    for bits in _RECOMMENDED_BITS:
        running = [name for name in read_quantizers() if bits in report.quantizers.get(name, ())]
        libraries = ["none"] if bits == 16 else running
        method = next((found for name in libraries if (found := method_for(name, bits))), None)
        if method is None:
            continue
        config = QuantizationConfig(method=method, bits=bits, compute_dtype=dtype)
        if estimate_batch(
            report, model_size_b, limit=limit, context=_RECOMMENDED_CONTEXT, bits=bits, at_most=1
        ):
            return config
    warnings.warn(
        f"A model of {model_size_b:g}B parameters is not expected to train in {available_memory_gb:g} GiB "
        f"on {report.name}, not even with {config.bits} bits.",
        UserWarning,
        stacklevel=2,
    )
    return config


def _report(backend: str | Backend | None, machine: Machine | None) -> BackendReport:
    return BackendManager(backend, verbose=False, machine=machine).report


def _problems(config: QuantizationConfig, report: BackendReport) -> list[str]:
    """Return why one configuration, without its `layer_configs`, does not run on the backend."""
    try:
        check_config(config)
        found = _library_problem(config, report)
    except ValueError as error:
        found = str(error)
    return [problem for problem in (found, _dtype_problem(config, report)) if problem]


def _library_problem(config: QuantizationConfig, report: BackendReport) -> str:
    if config.method.library == "none" or config.bits in report.quantizers.get(config.method.library, ()):
        return ""
    runs = [f"{name} {'/'.join(map(str, sorted(bits)))}" for name, bits in report.quantizers.items()]
    return (
        f"{config.method.name} with {config.bits} bits does not run on {report.name}; "
        f"these run: {'; '.join(runs) or 'none'} (and NONE, 16 bits)."
    )


def _dtype_problem(config: QuantizationConfig, report: BackendReport) -> str:
    name = dtype_name(config.compute_dtype)
    works = [name for name, short in DTYPES.items() if short in report.dtypes]
    if name is None or name in works:
        return ""
    return f"compute_dtype {name} does not work on {report.name}; these do: {', '.join(works)}."


def _adjust(config: QuantizationConfig, report: BackendReport) -> tuple[QuantizationConfig, list[str]]:
    """Return the configuration that will run, and a sentence for each change."""
    used, changes = config, []
    problems = [problem for each in each_config(config) if (problem := _library_problem(each, report))]
    if problems:
        used = _with_other_library(config, report) or replace(
            config,
            method=QuantizationMethod.NONE,
            bits=16,
            quant_type="nf4",
            storage_dtype=None if "bf16" in report.dtypes else "float16",
            layer_configs={},
        )
        layers = " and layer_configs is dropped" if config.layer_configs and not used.layer_configs else ""
        changes.append(f"{problems[0]} {used.method.name} is used instead{layers}.")
    if problem := _dtype_problem(used, report):
        better = "float16" if "fp16" in report.dtypes else "float32"
        changes.append(f"{problem} {better} is used instead.")
        used = replace(used, compute_dtype=torch_dtype(DTYPES[better]))
    return used, changes


def _with_other_library(config: QuantizationConfig, report: BackendReport) -> QuantizationConfig | None:
    """Return the configuration with the same bits in the first library that runs every layer on this backend."""
    widths = {each.bits for each in each_config(config)}
    for library in read_quantizers():
        if not all(method_for(library, bits) for bits in widths):
            continue
        moved = config.moved_to(library)
        if moved is not None and not any(_library_problem(each, report) for each in each_config(moved)):
            return moved
    return None
