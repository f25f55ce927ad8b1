"""Gather the facts for a plan: the machine, and the model if it is available locally. Make plans from them."""

from __future__ import annotations

import importlib.util
import netrc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from crosstune.config.conditions import TRAIN_TYPE_PARTS, teaches_by_base
from crosstune.config.load import backend_variables, launch_variables, make_config
from crosstune.config.mlx_settings import read_settings
from crosstune.config.recipe_spec import load_recipe
from crosstune.config.resolve.facts import Facts, Preset, StoredQuantization, auto_preference
from crosstune.config.resolve.plan import Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.core.quantization import (
    BaseChoice,
    QuantSpec,
    quantizer_names,
    read_quantizers,
    recorded_choice,
)
from crosstune.estimate.machine import Machine, choose_backend
from crosstune.estimate.model_shape import ModelShape
from crosstune.machines.probe import probe_machine
from crosstune.models.locate import shape
from crosstune.models.quantized_folder import quantization_options, read_quantization
from crosstune.planner.measurements import read_corrections
from crosstune.process.ranks import Ranks


def make_plan(
    config: Config,
    *,
    machine: Machine | None = None,
    longest_row: int | None = None,
    ranks: Ranks | None = None,
    base: BaseChoice | None = None,
) -> Plan:
    """Return the plan of `train` on `machine`, by default this one; `base` is an earlier run's choice of quantized layers."""
    return resolve(config, gather(config, machine=machine, longest_row=longest_row, ranks=ranks, base=base))


def gather(
    config: Config,
    *,
    machine: Machine | None = None,
    longest_row: int | None = None,
    ranks: Ranks | None = None,
    base: BaseChoice | None = None,
) -> Facts:
    """Return the facts that `resolve` needs. Probe the machine unless one is given; download nothing."""
    machine = machine if machine is not None else probe_for(config)
    preset, recipe = _preset(config, machine), load_recipe(config.recipe)
    return Facts(
        machine=machine,
        backends=backend_specs(),
        quantizers=read_quantizers(),
        environment=backend_variables(),
        ranks=ranks if ranks is not None and ranks.size > 1 else None,
        mlx_settings=read_settings(config.mlx_config),
        longest_row=longest_row,
        preset=preset,
        corrections=read_corrections(machine),
        ready_tracker=_ready_tracker(config) if ranks is None or ranks.num_nodes == 1 else None,
        engines=recipe.engines,
        has_base_model=recipe.needs_base_model,
        base=base,
        **model_facts(config, preset),
    )


def _ready_tracker(config: Config) -> str | None:
    """Return wandb if --project_name was set without --log_to, and wandb is installed and has a key or is offline."""
    if "project_name" not in config.sources or "log_to" in config.sources:
        return None
    variables = launch_variables()
    ready = bool(variables.get("WANDB_API_KEY")) or variables.get("WANDB_MODE") == "offline"
    if not ready:
        host = urlsplit(variables.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
        try:
            path = variables.get("NETRC") or str(Path("~/.netrc").expanduser())
            ready = netrc.netrc(path).authenticators(host) is not None
        except (OSError, ValueError, netrc.NetrcParseError):
            ready = False
    return "wandb" if ready and importlib.util.find_spec("wandb") is not None else None


def may_have_several_devices() -> bool:
    """Return True if it is worth counting the devices for `--world_size -1`. Counting loads an engine; this check is cheap."""
    nvidia = len(list(Path("/dev").glob("nvidia[0-9]*")))
    others = len(list(Path("/dev/dri").glob("renderD*")))  # AMD and Intel
    return max(nvidia, others) > 1


def with_all_devices(config: Config, *, machine: Machine | None = None) -> Config:
    """Replace `--world_size -1` with the number of devices, as the command `train` does."""
    if config.world_size != -1:
        return config
    plan = make_plan(config, machine=machine)
    if plan.engine == "mlx" or plan.backend.is_torch_cpu or len(plan.backend.devices) < 2:
        return config
    asked = {**config.sources, "world_size": "all devices of the machine"}
    return replace(config, world_size=len(plan.backend.devices), sources=asked)


def _preset(config: Config, machine: Machine) -> Mapping[str, Preset]:
    """Return the options that the recipe sets for the backend."""
    recipe = load_recipe(config.recipe)
    if recipe.choose_preset is None:
        return {}
    name = config.backend
    if name == "auto" and machine.available():
        name = choose_backend(machine, preference=auto_preference(backend_specs(), engines=recipe.engines))
    report = machine.backends.get(name)
    if report is None or not report.available:
        return {}
    return recipe.choose_preset(config, report)


def _with_preset(config: Config, preset: Mapping[str, Preset]) -> Config:
    return replace(config, **{option: chosen.value for option, chosen in preset.items()})


def model_facts(config: Config, preset: Mapping[str, Preset]) -> dict[str, Any]:
    """Return the fields of `Facts` about the model that are known before a download."""
    config = _with_preset(config, preset)
    if not load_recipe(config.recipe).needs_base_model:
        return {"shape": None, "stored": None}
    method, library = TRAIN_TYPE_PARTS[config.train_type]
    loaded = (config.llama_pro_path if method == "llama_pro" else None) or config.model_name
    folder = Path(config.model_name).expanduser()
    teacher = config.teacher if config.recipe == "distill" else None
    return {
        "teacher": shape(teacher) if teacher and not teaches_by_base(config.options()) else None,
        "shape": _with_rope(shape(loaded), config),
        "stored": _stored_quantization(folder) if library != "none" else None,
    }


def _with_rope(found: ModelShape | None, config: Config) -> ModelShape | None:
    """Return the shape with the context of --rope_scaling."""
    if found is None or not found.max_context or config.rope_scaling == "none":
        return found
    return replace(found, max_context=int(found.max_context * max(1, config.rope_factor or 1)))


def probe_for(config: Config) -> Machine:
    """Probe the requested backend; probe all backends when it is `auto` or not available."""
    machine = _probe(config, quantizers=_needs_quantizers(config))
    preset = _preset(config, machine)
    if not _needs_quantizers(config) and _needs_quantizers(_with_preset(config, preset)):
        return _probe(config, quantizers=True)
    return machine


def _probe(config: Config, *, quantizers: bool) -> Machine:
    wanted = quantizer_names() if quantizers else ()
    if config.backend != "auto":
        machine = probe_machine(backends=[config.backend], quantizers=wanted)
        if machine.available():
            return machine
    return probe_machine(quantizers=wanted)


def _stored_quantization(folder: Path) -> StoredQuantization | None:
    found = read_quantization(folder) if (folder / "config.json").is_file() else None
    if found is None:
        return None
    return StoredQuantization(
        source=str(folder), quantizer=found.spec.quantizer, options=quantization_options(found.spec)
    )


def _needs_quantizers(config: Config) -> bool:
    """Return True if quantizers must be probed. Probing imports their libraries."""
    if config.optimizer.endswith("_8bit"):
        return True
    return TRAIN_TYPE_PARTS[config.train_type][1] != "none" or config.quantization_backend not in (
        "auto",
        "none",
    )


def plan_over_quantized(like: Plan, spec: QuantSpec, *, folder: Path) -> Plan:
    """Plan to open quantized weights as in the plan `like`; raise a UserError if their quantizer does not run."""
    options = quantization_options(spec) | {"train_type": "lora", "model_name": str(folder)}
    plan = plan_like(like, options | {"precision": like.precision}, base=recorded_choice(spec))
    if plan.quantizer != spec.quantizer:
        install = read_quantizers()[spec.quantizer].install_command
        raise UserError(
            f"{spec.quantizer} with {spec.bits} bits does not run on {plan.backend.name} on this machine.",
            do=f"{install}, or list what runs with: crosstune doctor",
        )
    return plan


def plan_like(plan: Plan, options: Mapping[str, Any], *, base: BaseChoice | None = None) -> Plan:
    """Plan other options on the backend of a plan; probe the machine again only to find quantizers."""
    needs_probe = "quantization_backend" in options and not plan.backend.quantizers
    config = make_config(**options, backend=plan.backend.name)
    return make_plan(config, machine=None if needs_probe else plan.machine, base=base)
