"""Read the time limits of a run of several processes, and warn about implausible values."""

from __future__ import annotations

from collections.abc import Mapping

from crosstune.config.option import parse_duration
from crosstune.config.schema import Config
from crosstune.process.ranks import Limits

SHORTEST_S = 60.0
"""An evaluation or a checkpoint of a large model may exceed a shorter limit."""
LONGEST_S = 86_400.0
_MILLISECONDS_S = 600_000.0
"""A larger number was probably meant in milliseconds."""
_BLOCKS = "blocking collectives cannot overlap with computation, so 0 is used"
_NEVER_ENDS = "NCCL would never abort a collective that fails or hangs, so it is not used"
_OVERRIDDEN = {
    "TORCH_NCCL_BLOCKING_WAIT": (True, _BLOCKS),
    "NCCL_BLOCKING_WAIT": (True, _BLOCKS),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (False, _NEVER_ENDS),
    "NCCL_ASYNC_ERROR_HANDLING": (False, _NEVER_ENDS),
    "TORCH_NCCL_ENABLE_MONITORING": (
        False,
        "a hang of NCCL's watchdog would go unnoticed, so it is not used",
    ),
}
"""Variable -> (whether it is overridden if on, rather than if off; reason)."""
_SET_BY = {"collective_timeout": "NCCL_TIMEOUT", "heartbeat_timeout": "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"}


def limits_of(config: Config) -> Limits:
    """Return the limits of a run. NCCL's heartbeat is at least as long as the limit of a collective: otherwise its watchdog
    would abort the process before the collective can report."""
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
        if name in config.sources and (text := getattr(config, name)):
            warnings += _unlikely(name, parse_duration(text))
    asked_s = parse_duration(config.heartbeat_timeout) if config.heartbeat_timeout else limits.heartbeat_s
    if asked_s < limits.collective_s:
        warnings.append(
            f"heartbeat_timeout is {asked_s:g} s, shorter than collective_timeout: NCCL's watchdog would abort a process in a "
            f"slow collective, so {limits.collective_s:g} s is used"
        )
    for name, variable in _SET_BY.items():
        given = environment.get(variable, "").strip()
        if (
            given
            and config.sources.get(name, variable) != variable
            and _seconds(given) != parse_duration(getattr(config, name))
        ):
            warnings.append(f"{variable} is {given}, but --{name} {getattr(config, name)} is used")
    for variable, (when_on, why) in _OVERRIDDEN.items():
        given = environment.get(variable, "").strip()
        if given and (given != "0") == when_on:
            warnings.append(f"{variable} is {given}: {why}")
    return warnings


def _unlikely(name: str, seconds: float) -> list[str]:
    if seconds >= _MILLISECONDS_S:
        return [
            f"{name} is {seconds:.0f} s, {seconds / 86_400:.0f} days: a hung process would be noticed only then. The unit is "
            "seconds, not milliseconds; 30m is usual"
        ]
    if seconds > LONGEST_S:
        return [
            f"{name} is {seconds / 3600:.0f} hours: a hung process would be noticed only then; 30m is usual"
        ]
    if seconds < SHORTEST_S:
        return [
            f"{name} is {seconds:g} s: a longer evaluation, checkpoint or download on one process ends the run; 30m is usual; "
            "a number without a unit is in seconds"
        ]
    return []


def _seconds(text: str) -> float | None:
    try:
        return parse_duration(text)
    except ValueError:
        return None
