"""Plans for requests on the bundled machines, without a model or data on disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from crosstune.config.load import make_config
from crosstune.config.resolve.facts import Facts
from crosstune.config.resolve.plan import Adjustment, Plan
from crosstune.config.resolve.resolve import resolve
from crosstune.core.backend import backend_specs
from crosstune.core.quantization import BaseChoice, read_quantizers
from crosstune.estimate.machine import Machine
from crosstune.estimate.model_shape import ModelShape
from crosstune.machines.probe import load_machine
from crosstune.process.ranks import Ranks


def plan_on(
    machine: str | Machine,
    *,
    shape: ModelShape | None = None,
    ranks: Ranks | None = None,
    base: BaseChoice | None = None,
    facts: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Plan:
    config = make_config(**asked)
    known = Facts(
        machine=load_machine(machine) if isinstance(machine, str) else machine,
        backends=backend_specs(),
        quantizers=read_quantizers(),
        shape=shape,
        ranks=ranks,
        base=base,
        **facts or {},
    )
    return resolve(config, known)


def adjustment(plan: Plan, option: str, kind: str) -> Adjustment:
    [found] = [a for a in plan.adjustments if a.option == option and a.kind == kind]
    return found
