"""The limits of a run of several processes, and values that cannot be meant."""

from __future__ import annotations

import pytest

from crosstune.config.load import load_config, make_config
from crosstune.config.time_limits import limit_warnings, limits_of, nccl_variables
from crosstune.core.errors import UserError


def test_the_defaults_are_those_of_the_guide() -> None:
    limits = limits_of(make_config())
    assert (limits.collective_s, limits.heartbeat_s, limits.debug) == (1800.0, 1800.0, False)
    variables = nccl_variables(limits)
    assert variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "1800"
    assert variables["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert limit_warnings(make_config(), {}) == []


def test_the_variables_of_the_guide_are_read() -> None:
    config = load_config(environment={"NCCL_TIMEOUT": "900", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"})
    limits = limits_of(config)
    assert (limits.collective_s, limits.heartbeat_s) == (900.0, 1200.0)
    assert limit_warnings(config, {"NCCL_TIMEOUT": "900"}) == []


def test_the_heartbeat_is_never_shorter_than_a_collective() -> None:
    config = make_config(collective_timeout="30m", heartbeat_timeout="10m")
    assert limits_of(config).heartbeat_s == 1800.0
    [warning] = limit_warnings(config, {})
    assert "heartbeat_timeout is 600 s, shorter than collective_timeout" in warning
    assert limits_of(make_config(collective_timeout="2h")).heartbeat_s == 7200.0


@pytest.mark.parametrize(
    ("options", "variables", "words"),
    [
        ({"collective_timeout": "1800000"}, {}, "not milliseconds"),
        ({"collective_timeout": "30"}, {}, "collective_timeout is 30 s"),
        (
            {"collective_timeout": "20m"},
            {"NCCL_TIMEOUT": "7200"},
            "NCCL_TIMEOUT is 7200, but --collective_timeout 20m",
        ),
        ({}, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "so 0 is used"),
        ({}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "would never abort"),
    ],
)
def test_values_that_cannot_be_meant_are_warned_of(
    options: dict[str, str], variables: dict[str, str], words: str
) -> None:
    warnings = limit_warnings(make_config(**options), variables)
    assert len(warnings) == 1 and words in warnings[0]


@pytest.mark.parametrize("value", ["0", "-5", "soon", "10 parsecs", ""])
def test_what_is_no_duration_is_refused(value: str) -> None:
    with pytest.raises(UserError):
        make_config(collective_timeout=value)
