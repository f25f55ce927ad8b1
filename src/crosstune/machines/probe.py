"""Describe a machine: probe this one, or read a profile or a file of `crosstune doctor`; and give advice for it."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from crosstune.backends._host import memory_bytes, processor_name
from crosstune.config.load import add_environment
from crosstune.core.backend import BackendSpec, backend_specs
from crosstune.core.errors import UserError
from crosstune.core.names import did_you_mean, unknown_name
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.machine import BackendReport, Machine, choose_backend, read_machine
from crosstune.estimate.memory import GIB
from crosstune.machines.catalog import (
    catalog_names,
    make_apple,
    make_gpu,
    split_count,
    split_size,
    with_devices,
    with_memory,
)
from crosstune.process.this_process import num_cores

PACKAGES = ("crosstune", "torch", "transformers", "peft", "mlx", "mlx-lm", "numpy")
"""Packages with recorded versions, in addition to the quantizers' libraries."""
ROOMY_GPU_BYTES = 24 * GIB
"""GPU memory above which a 16-bit base is recommended, otherwise a 4-bit one."""

_PROFILES = Path(__file__).parent / "profiles"


def probe_machine(*, backends: Sequence[str] | None = None, quantizers: Sequence[str] = ()) -> Machine:
    """Probe all backends or the given backends, and `quantizers`, whose libraries are imported."""
    specs = backend_specs()
    for name in backends or ():
        if name not in specs:
            raise unknown_name("backend", name, specs)
    chosen = [spec for spec in specs.values() if backends is None or spec.name in backends]
    # Before any engine is imported: torch reads these variables once, at import.
    for spec in chosen:
        add_environment(spec)
    return Machine(
        name=platform.node() or "this machine",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=processor_name(),
        num_cores=num_cores(),
        memory_total_bytes=memory_bytes()[0],
        backends={spec.name: probe_backend(spec, quantizers=quantizers) for spec in chosen},
        versions=_versions(),
    )


def probe_backend(spec: BackendSpec, *, quantizers: Sequence[str] = ()) -> BackendReport:
    """Run the probe of the backend's engine."""
    probe = importlib.import_module(f"crosstune.{spec.engine}_engine.probe").probe
    report: BackendReport = probe(spec, quantizers=quantizers)
    return report


def bundled_profiles() -> list[str]:
    """Return the names of the profile files."""
    return sorted(path.stem for path in _PROFILES.glob("*.json"))


def profile_names() -> list[str]:
    """Return the names for --machine, each of one GPU, an Apple chip or a CPU."""
    return sorted({*bundled_profiles(), *catalog_names()})


def load_machine(name_or_path: str) -> Machine:
    """Read a bundled profile by name, such as `rtx-4090`, `rtx-4090:48gb` or `h100-x8`, or a file written by
    `crosstune doctor --json`."""
    names = profile_names()
    whole, count = split_count(name_or_path.lower())
    name, size_gb = split_size(whole)
    if name in names and (count == 1 or not name.startswith(("apple-", "cpu-"))):
        machine = _profile(name)
        machine = machine if size_gb is None else with_memory(machine, size_gb)
        return machine if count == 1 else with_devices(machine, count)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return read_machine(path)
    raise UserError(
        f"Unknown machine '{name_or_path}'.",
        why="it is neither a bundled profile nor a file.",
        do=f"{_similar(name, names)}`crosstune plan --machine list` prints the profiles; rtx-4090:48gb means the profile "
        "with 48 GB, and the suffix -x4 four GPUs. Make a file with: crosstune doctor --json > machine.json",
    )


def _similar(name: str, names: Sequence[str]) -> str:
    """Return a question with the nearest names of the same kind: another RTX for an RTX, a Mac for a Mac."""
    words = re.sub(r"[\s_-]+", "-", name).replace("nvidia-", "").replace("geforce-", "").replace("tesla-", "")
    if re.match(r"m[1-9]\b", words):
        words = f"apple-{words}"
    kind = words.partition("-")[0]
    return did_you_mean(words, [known for known in names if known.partition("-")[0] == kind] or names)


def _profile(name: str) -> Machine:
    if name in bundled_profiles():
        return read_machine(_PROFILES / f"{name}.json")
    if name.startswith("apple-"):
        return make_apple(name, read_machine(_PROFILES / "apple-m2-max-64gb.json"))
    return make_gpu(name, read_machine(_PROFILES / "rtx-4090.json"))


def preference() -> list[str]:
    """Return the backend names in the order of `auto`."""
    return list(backend_specs())


def fastest_backend(machine: Machine) -> str:
    return choose_backend(machine, preference=preference())


def typical_machine(backend: str) -> Machine | None:
    """Return a profile with the backend, preferably as its fastest; None if there is none."""
    machines = [found for found in map(load_machine, bundled_profiles()) if backend in found.available()]
    return min(machines, key=lambda found: fastest_backend(found) != backend, default=None)


def recommend(machine: Machine) -> list[str]:
    """Return advice: sentences, each followed by an indented command."""
    if not machine.available():
        return ["No engine is installed yet. Install one:", "  pip install 'crosstune[torch]'"]
    reports = {name: report for name, report in machine.backends.items() if report.available}
    best = reports[fastest_backend(machine)]
    command = f"  crosstune train --backend {best.name} --train_type"
    if "mps" in reports or (best.name == "mlx" and best.unified_memory):
        lines = ["Best speed on Apple silicon: MLX."]
        if "mlx" not in reports:
            lines.append("  pip install 'crosstune[mlx]'")
        lines.append("  crosstune train --backend mlx --train_type qlora")
        if "mps" in reports:
            lines.append("If you need the PyTorch ecosystem: MPS.")
            lines.append("  crosstune train --backend mps --train_type lora")
        return lines
    if best.name == "cpu" or best.device == "cpu":
        cores = machine.num_cores
        return [
            "Only the CPU is available: expect it to be 10 to 100 times slower than a GPU. For tests:",
            f"{command} lora",
            "For production runs, use every core:",
            f"  OMP_NUM_THREADS={cores} MKL_NUM_THREADS={cores} {command.strip()} lora",
        ]
    name = best.devices[0].name if best.devices else best.name
    size = f"{name} with {best.memory_total_bytes / GIB:.0f} GiB"
    if best.memory_total_bytes > ROOMY_GPU_BYTES:
        return [f"{size}: enough memory for a 16-bit base. Train LoRA on it:", f"{command} lora"]
    lines = [f"{size}: keep the base in 4 bits so that larger models fit. Train QLoRA with bitsandbytes:"]
    if 4 not in best.quantizers.get("bnb", ()):
        lines.append("  pip install 'crosstune[bnb]'")
    return [*lines, f"{command} qlora --quantization_backend bnb"]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    libraries = [quantizer.distribution for quantizer in read_quantizers().values()]
    for package in dict.fromkeys((*PACKAGES, *libraries)):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
