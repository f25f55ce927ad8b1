"""Read the time limits of a run of several processes, and warn about values that are not used."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.config.option import parse_duration
from crosstune.config.schema import Config, options_by_name
from crosstune.process.ranks import Limits


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
    """Return a warning for a limit, and for each variable of NCCL, that is not used as it was set."""
    limits, warnings = limits_of(config), list[str]()
    asked_s = parse_duration(config.heartbeat_timeout) if config.heartbeat_timeout else limits.heartbeat_s
    if asked_s < limits.collective_s:
        warnings.append(
            f"heartbeat_timeout is {asked_s:g} s, shorter than collective_timeout: NCCL's watchdog would abort a process in a "
            f"slow collective, so {limits.collective_s:g} s is used"
        )
    for name, used in nccl_variables(limits).items():
        given = environment.get(name, used)
        if given != used and name != options_by_name()["heartbeat_timeout"].env:
            warnings.append(f"{name} is {given}, but {used} is used, so that a hang is reported")
    return warnings
