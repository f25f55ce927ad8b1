"""What a run will be here: the machine is asked as far as the request needs it, and the options are resolved."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crosstune.config.load import cache_override, make_config
from crosstune.config.plan import TRAIN_TYPE_PARTS, Plan
from crosstune.config.resolve import resolve
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.core.machine import Machine
from crosstune.core.quantization import QuantSpec
from crosstune.core.ranks import Ranks
from crosstune.machines.probe import probe_machine
from crosstune.models.folder import read_config_json
from crosstune.models.locate import shape
from crosstune.models.quantized_folder import quantization_options, read_quantization

ALL_QUANTIZERS = ("bnb", "hqq", "quanto", "mlx")


def make_plan(
    config: Config,
    *,
    machine: Machine | None = None,
    longest_row: int | None = None,
    ranks: Ranks | None = None,
) -> Plan:
    """Plan what `train` would do with this configuration, on `machine` or on this one."""
    specs = backend_specs()
    config = as_the_folder_is(config)
    return resolve(
        config,
        machine=machine if machine is not None else probe_for(config),
        collectives={name: spec.collective for name, spec in specs.items()},
        preference=list(specs),
        installs={name: spec.install for name, spec in specs.items()},
        shape=shape(_weights_name(config), cache=cache_override()),
        longest_row=longest_row,
        ranks=ranks if ranks is not None and ranks.size > 1 else None,
    )


def probe_for(config: Config) -> Machine:
    """This machine, as far as the request needs it; all of it when the backend asked for is not there."""
    quantizers = ALL_QUANTIZERS if _wants_quantizer(config) else ()
    if config.backend != "auto":
        machine = probe_machine(backends=[config.backend], quantizers=quantizers)
        if machine.available():
            return machine
    return probe_machine(quantizers=quantizers)


def unreadable(plan: Plan) -> list[UserError]:
    """Why mlx-lm would not read the model, as `train` says it; as far as that can be known here without loading it."""
    folder = Path(plan.config.model_name).expanduser()
    knowable = plan.engine == "mlx" and importlib.util.find_spec("mlx_lm") is not None
    if not knowable or not (folder / "config.json").is_file():
        return []
    from crosstune.mlx_engine.load import check_readable

    try:
        check_readable(folder, read_config_json(folder))
    except UserError as error:
        return [error]
    return []


def as_the_folder_is(config: Config) -> Config:
    """A folder of quantized weights says itself how they are quantized; what the user asked for stays."""
    folder = Path(config.model_name).expanduser()
    library = TRAIN_TYPE_PARTS[config.train_type][1]
    if library == "none" or not (folder / "config.json").is_file():
        return config
    found = read_quantization(folder)
    if found is None or library not in ("auto", found.spec.quantizer):
        return config
    given = {name: v for name, v in quantization_options(found.spec).items() if name not in config.asked}
    sources = {**config.asked, **dict.fromkeys(given, str(folder))}
    return dataclasses.replace(config, **given, asked=sources)


def _weights_name(config: Config) -> str:
    """The model whose weights are loaded."""
    takes_path = TRAIN_TYPE_PARTS[config.train_type][0] == "llama_pro"
    return (config.llama_pro_path if takes_path else None) or config.model_name


def _wants_quantizer(config: Config) -> bool:
    """Whether quantizers are worth trying, which means importing their libraries."""
    if config.optimizer.endswith("_8bit"):
        return True
    return TRAIN_TYPE_PARTS[config.train_type][1] != "none" or config.quantization_backend not in (
        "auto",
        "none",
    )


def plan_over_quantized(like: Plan, spec: QuantSpec, *, folder: Path) -> Plan:
    """The plan to open a folder of quantized weights, with the backend and precision of another; an error where its
    quantizer does not run."""
    options = quantization_options(spec) | {"train_type": "lora", "model_name": str(folder)}
    plan = plan_like(like, options | {"precision": like.precision})
    if plan.quantizer != spec.quantizer:
        raise UserError(
            f"{spec.quantizer} with {spec.bits} bits does not run on {plan.backend.name} here.",
            do=f"pip install 'crosstune[{spec.quantizer}]', or see what does: crosstune doctor",
        )
    return plan


def plan_like(plan: Plan, options: Mapping[str, Any]) -> Plan:
    """Other options on the backend of a plan. Its machine is looked at again only to find quantizers."""
    needs_look = "quantization_backend" in options and not plan.backend.quantizers
    config = make_config(**options, backend=plan.backend.name)
    return make_plan(config, machine=None if needs_look else plan.machine)
