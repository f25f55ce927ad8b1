"""Read the time limits of a run of several processes, and warn about implausible values."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.config.option import parse_duration
from crosstune.config.schema import Config, options_by_name
from crosstune.process.ranks import Limits

SHORTEST_S, LONGEST_S = 60.0, 86_400.0
"""Warn about limits outside this range: an evaluation or a checkpoint of a large model may take more than a minute."""
_OVERRIDDEN = {
    "TORCH_NCCL_BLOCKING_WAIT": "blocking collectives cannot overlap with computation, so 0 is used",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "NCCL would never abort a collective that fails or hangs, so it is not used",
    "TORCH_NCCL_ENABLE_MONITORING": "a hang of NCCL's watchdog would go unnoticed, so it is not used",
}
"""Variable -> the effect of a value other than in `nccl_variables`."""


def limits_of(config: Config) -> Limits:
    """Return the limits of a run; NCCL's watchdog must not abort a process before a collective can report."""
    collective_s = parse_duration(config.collective_timeout)
    heartbeat_s = parse_duration(config.heartbeat_timeout) if config.heartbeat_timeout else collective_s
    return Limits(
        connect_s=parse_duration(config.connect_timeout),
        collective_s=collective_s,
        heartbeat_s=max(heartbeat_s, collective_s),
        debug=config.debug_collectives,
    )


def nccl_variables(limits: Limits) -> dict[str, str]:
    """Return the environment variables that apply the limits to NCCL's watchdog."""
    return {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(round(limits.heartbeat_s)),
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }


def limit_warnings(config: Config, environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each implausible limit and each variable that contradicts one."""
    limits, warnings = limits_of(config), list[str]()
    for name in ("collective_timeout", "heartbeat_timeout"):
        text, variable = getattr(config, name), options_by_name()[name].env
        if name not in config.sources or not text:
            continue
        seconds = parse_duration(text)
        if not SHORTEST_S <= seconds <= LONGEST_S:
            effect = "a longer evaluation or checkpoint on one process would end the run"
            if seconds > LONGEST_S:
                effect = "a hung process would be noticed only then"
            unit = "a number without a unit is in seconds, not milliseconds"
            warnings.append(f"{name} is {seconds:,.0f} s: {effect}; 30m is usual; {unit}")
        given = environment.get(variable or "", "").strip()
        if given and config.sources[name] != variable and given not in (text, f"{seconds:g}"):
            warnings.append(f"{variable} is {given}, but --{name} {text} is used")
    asked_s = parse_duration(config.heartbeat_timeout) if config.heartbeat_timeout else limits.heartbeat_s
    if asked_s < limits.collective_s:
        warnings.append(
            f"heartbeat_timeout is {asked_s:g} s, shorter than collective_timeout: NCCL's watchdog would abort a process in a "
            f"slow collective, so {limits.collective_s:g} s is used"
        )
    for variable, why in _OVERRIDDEN.items():
        used = nccl_variables(limits)[variable]
        for name in (variable, variable.removeprefix("TORCH_")):
            given = environment.get(name, "").strip()
            if given and (given == "0") != (used == "0"):
                warnings.append(f"{name} is {given}: {why}")
    return warnings
